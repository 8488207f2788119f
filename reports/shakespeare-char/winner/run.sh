#!/bin/sh
# Trains the recommended configuration once more, without carbonopt. Needs an environment with what requirements.txt
# lists; writes the model and result.json into output/ beside it.
set -eu
usage() {
    cat <<'END'
Usage: ./run.sh [--data FOLDER]
Trains the recommended configuration once more, into output/ beside this script. What inputs.json lists has to lie in
data/ beside the script, or in FOLDER.
END
}
case "$#,${1-}" in
    0, | 1,--data=?* | 2,--data) ;;
    *,-h | *,--help) usage; exit 0 ;;
    *)
        usage >&2
        echo "run.sh: it takes --data FOLDER alone, not: $*" >&2
        exit 2 ;;
esac
export CALLED_FROM="$PWD"
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")"  # of the file itself, where a link to it was called
command -v accelerate >/dev/null || { echo "accelerate is not on PATH: activate its environment" >&2; exit 127; }
# Its ninja first: for another one DeepSpeed's operators count as changed, and are compiled anew.
export PATH="$(dirname -- "$(command -v accelerate)"):$PATH"
python3 inputs.py "$@"  # here, and not only where they are read: there a launcher's traceback would follow
export TOKENIZERS_PARALLELISM=false
if [ -n "${TORCH_CUDA_ARCH_LIST-}" ]; then  # DeepSpeed takes what follows the dot for a number and dies on 9.0a
    TORCH_CUDA_ARCH_LIST=$(printf %s "$TORCH_CUDA_ARCH_LIST" | sed 's/\([0-9]\.[0-9][0-9]*\)[a-z][a-z]*/\1/g')
    export TORCH_CUDA_ARCH_LIST
fi
threads=$(($(nproc) / 1))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
exec accelerate launch --config_file accelerate.yaml train.py "$@"
