#!/bin/sh
# Trains once more with the recommended configuration; takes the options of `carbonopt run`.
command -v carbonopt >/dev/null || { echo "carbonopt is not on PATH: activate its environment" >&2; exit 127; }
exec carbonopt run "$(dirname "$0")/rerun.yaml" "$@"
