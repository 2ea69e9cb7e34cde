#!/usr/bin/env bash
# Runs everything that an acceptance list asks for and prints a table; exits with 1 when a figure misses its bound.
# `scripts/acceptance.sh --list` names the jobs, `scripts/acceptance.sh TEXT` runs those whose name contains it. Takes
# several hours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --all
export OMP_NUM_THREADS=1
exec .venv/bin/python scripts/bench/all.py --whole "$@"
