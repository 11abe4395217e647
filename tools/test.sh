#!/usr/bin/env bash
# Set up the environment if need be and run the tests.
#
#   bash tools/test.sh [--all] [pytest arguments]     --all: also those marked slow (real models, minutes)
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/tools/setup.sh"
select=(-m "not slow")
if [[ ${1:-} == --all ]]; then
    select=()
    shift
fi
cd -- "$root"
exec .venv/bin/python -m pytest "${select[@]}" "$@"
