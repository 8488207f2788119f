#!/bin/sh
# Trains the recommended configuration once more, without carbonopt. Needs an environment with what requirements.txt
# lists; writes the model and result.json into output/ beside it.
#     ./run.sh [--data FOLDER]
# What inputs.json lists has to lie in data/ beside this file, or in FOLDER.
set -eu
export CALLED_FROM="$PWD"
CDPATH='' cd -- "$(dirname -- "$0")"
command -v accelerate >/dev/null || { echo "accelerate is not on PATH: activate its environment" >&2; exit 127; }
python3 inputs.py "$@"  # here, and not only where they are read: there a launcher's traceback would follow
export TOKENIZERS_PARALLELISM=false
if [ -n "${TORCH_CUDA_ARCH_LIST-}" ]; then  # DeepSpeed takes what follows the dot for a number and dies on 9.0a
    TORCH_CUDA_ARCH_LIST=$(printf %s "$TORCH_CUDA_ARCH_LIST" | sed 's/\([0-9]\.[0-9][0-9]*\)[a-z][a-z]*/\1/g')
    export TORCH_CUDA_ARCH_LIST
fi
threads=$(($(nproc) / 1))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
exec accelerate launch --config_file accelerate.yaml train.py "$@"
