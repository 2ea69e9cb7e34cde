#!/usr/bin/env bash
# Format, lint and types, in the environment that scripts/setup.sh --all made. Changes nothing.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
status=0
.venv/bin/python -m ruff format --check . || status=$?
.venv/bin/python -m ruff check . || status=$?
.venv/bin/python -m mypy || status=$?
exit "$status"
