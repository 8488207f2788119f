#!/bin/sh
# Trains the recommended configuration once more, into output/ beside this file. Needs an environment with what
# requirements.txt lists; of carbonopt, the folder carbonopt/ beside this file has all that is needed.
set -eu
device=gpu ranks=1  # as in the trial
export CALLED_FROM="$PWD"
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")"  # of the file itself, where a link to it was called
if [ -f inputs.json ]; then
    takes="--data FOLDER alone"
    usage="Usage: ./run.sh [--data FOLDER]
Trains the recommended configuration once more, into output/ beside this script. What inputs.json lists has to lie in
data/ beside the script, or in FOLDER."
else
    takes="no arguments"
    usage="Usage: ./run.sh
Trains the recommended configuration once more, into output/ beside this script. It needs no files, so that there is
nothing to give it."
fi
refuse() {
    echo "$usage" >&2
    echo "run.sh: it takes $takes, not: $*" >&2
    exit 2
}
case "$#,${1-}" in
    0,) ;;
    1,--data=?* | 2,--data) [ -f inputs.json ] || refuse "$@" ;;
    *,-h | *,--help) echo "$usage"; exit 0 ;;
    *) refuse "$@" ;;
esac
command -v accelerate >/dev/null || { echo "accelerate is not on PATH: activate its environment" >&2; exit 127; }
# Its ninja first: for another one DeepSpeed's operators count as changed, and are compiled anew.
export PATH="$(dirname -- "$(command -v accelerate)"):$PATH"
if [ -f inputs.json ]; then
    python3 inputs.py "$@"  # here, and not only where they are read: there a launcher's traceback would follow
fi
export TOKENIZERS_PARALLELISM=false
if [ "$device" = cpu ]; then
    export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=''
    # For speed, as in trials: OpenMP's threads look for work before they sleep, for long only where it can be noticed
    # that others want the cores, and what is freed stays at hand.
    spins=1000
    [ "$(cut -d ' ' -f 1 /proc/$$/schedstat 2>/dev/null || echo 0)" -gt 0 ] && spins=30000
    [ -n "${OMP_WAIT_POLICY+given}" ] || export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-$spins}"
    export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1099511627776}"
    export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1099511627776}"
fi
if [ -n "${TORCH_CUDA_ARCH_LIST-}" ]; then  # DeepSpeed takes what follows the dot for a number and dies on 9.0a
    TORCH_CUDA_ARCH_LIST=$(printf %s "$TORCH_CUDA_ARCH_LIST" | sed 's/\([0-9]\.[0-9][0-9]*\)[a-z][a-z]*/\1/g')
    export TORCH_CUDA_ARCH_LIST
fi
threads=$(($(nproc) / ranks))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
machines=''
if [ "${NNODES:-1}" -gt 1 ]; then  # typed on each of so many machines, with variables that torchrun has, too
    machines="--num_machines $NNODES --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR"
    machines="$machines --main_process_port ${MASTER_PORT:-29500} --same_network --deepspeed_multinode_launcher standard"
fi
# shellcheck disable=SC2086  # words, which have no spaces in them
exec accelerate launch --config_file accelerate.yaml $machines train.py "$@"
