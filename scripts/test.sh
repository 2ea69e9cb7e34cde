#!/usr/bin/env bash
# Sets up .venv if needed, checks format and types, and runs the tests. Arguments go to pytest:
#   scripts/test.sh                       what CI runs: one cell of each matrix
#   scripts/test.sh tests/routing -k ties
#   scripts/test.sh -m ""                 everything, the full matrices of the acceptance lists included
#   scripts/test.sh --ci                  in two processes, and judged as .ci/tests.py says
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --all
export OMP_NUM_THREADS=1
tests=(-m pytest)
if [ "${1-}" = --ci ]; then
    shift
    tests=(.ci/tests.py)
fi
# A failed check must not hide a failed test, nor the other way round.
status=0
scripts/check.sh || status=$?
.venv/bin/python "${tests[@]}" "$@" || status=$?
exit "$status"
