#!/bin/sh
# Trains the recommended configuration once more, without carbonopt. Needs an environment with torch, transformers,
# datasets, deepspeed and accelerate (and peft for LoRA); writes the model and result.json into output/ beside it.
set -eu
CDPATH='' cd -- "$(dirname -- "$0")"
command -v accelerate >/dev/null || { echo "accelerate is not on PATH: activate its environment" >&2; exit 127; }
export TOKENIZERS_PARALLELISM=false
threads=$(($(nproc) / 1))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
exec accelerate launch --config_file accelerate.yaml train.py
