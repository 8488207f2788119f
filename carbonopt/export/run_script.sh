#!/bin/sh
# Runs the training script once more with the recommended configuration. It needs the environment of your script; its
# lines for carbonopt do nothing here, and the folder carbonopt/ beside this file is all that they need.
@ELSEWHERE@set -eu
inside=@INSIDE@  # the script's folder in data/, where that has more than this one
export CALLED_FROM="$PWD"
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")"  # of the file itself, where a link to it was called
usage="Usage: ./run.sh [--data FOLDER]
Runs the training script once more with the recommended configuration, in data/ beside this file, or in FOLDER. What
inputs.json lists, the script among it, has to lie there.${inside:+ FOLDER may also be $inside in it.}"
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
here="$PWD" folder="$PWD/data"
case "$#,${1-}" in
    1,*) given="${1#--data=}" ;;
    2,*) given="$2" ;;
esac
if [ -n "${given+is}" ] && [ -n "$inside" ]; then
    given="$(cd "$CALLED_FROM" && cd -- "$given" && pwd)"
    set -- --data "${given%"/$inside"}"
    given="$2"
fi
if [ -f inputs.json ]; then
    python3 inputs.py "$@"
fi
[ -z "${given+is}" ] || folder="$(cd "$CALLED_FROM" && cd -- "$given" && pwd)"
@OUTPUT@export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
threads=$(($(nproc) / @RANKS@))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
[ -f inputs.json ] || [ -n "${given+is}" ] || mkdir -p "$folder/$inside"  # the command reads no file from there
@VARIABLES@cd "$folder/$inside"
program=@PROGRAM@
case "$program" in
    */*) ;;
    *)
        command -v -- "$program" >/dev/null || {
            echo "run.sh: there is no $program on PATH: activate the environment that your script runs in" >&2
            exit 1
        }
        ;;
esac
exec @COMMAND@
