#!/usr/bin/env bash
# From a fresh clone to a policy that has learned: sets up .venv if needed and runs the recipe copy4_quick. Arguments
# go to the run (`scripts/quickstart.sh --seed 1`). Exits with 1 when the policy did not learn.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# Before Python starts: OpenMP threads that spin on contended cores slow everything down about 30 times.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m titan_rl.train --recipe copy4_quick "$@"
