#!/bin/sh
# Runs the training script once more with the recommended configuration. It needs the environment of your script; its
# lines for carbonopt do nothing here, and the folder carbonopt/ beside this file is all that they need.
set -eu
export CALLED_FROM="$PWD"
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")"  # of the file itself, where a link to it was called
usage="Usage: ./run.sh [--data FOLDER]
Runs the training script once more with the recommended configuration, in data/ beside this file, or in FOLDER. What
inputs.json lists, the script among it, has to lie there."
refuse() {
    echo "$usage" >&2
    echo "run.sh: it takes --data FOLDER alone, not: $*" >&2
    exit 2
}
case "$#,${1-}" in
    0,) ;;
    1,--data=?* | 2,--data) ;;
    *,-h | *,--help) echo "$usage"; exit 0 ;;
    *) refuse "$@" ;;
esac
if [ -f inputs.json ]; then
    python3 inputs.py "$@"
fi
here="$PWD" folder="$PWD/data"
case "$#,${1-}" in
    1,*) folder="$(cd "$CALLED_FROM" && cd -- "${1#--data=}" && pwd)" ;;
    2,*) folder="$(cd "$CALLED_FROM" && cd -- "$2" && pwd)" ;;
esac
@OUTPUT@export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
threads=$(($(nproc) / @RANKS@))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
cd "$folder"
exec @COMMAND@
