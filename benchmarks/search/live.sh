#!/usr/bin/env bash
# The same space searched live, with the same number of trials and the same meter: carbonopt's search, and Optuna's
# default sampler for two objectives, which runs whole trials. Started again, it goes on where it was.
#
#     benchmarks/search/live.sh RUNS_FOLDER [SEED ...]
set -euo pipefail
here=$(dirname "$0")
runs=$1
shift
for seed in "${@:-0}"; do
  python3 -m carbonopt run "$here/live.yaml" --seed "$seed" --out "$runs/carbon-$seed" || test $? -eq 3
  stock=$here/live-tpe-$$.yaml
  sed -e 's/sampler: carbon/sampler: tpe\n  pruning: {target: false, cap: false}/' -e 's/name: live-carbon/name: live-tpe/' \
    "$here/live.yaml" > "$stock"
  python3 -m carbonopt run "$stock" --seed "$seed" --out "$runs/tpe-$seed" || { code=$?; rm "$stock"; test $code -eq 3; }
  rm -f "$stock"
done
