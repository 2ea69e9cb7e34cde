#!/usr/bin/env bash
# Makes .venv hold what scripts/requirements.lock says, with --all requirements-all.lock as well, and this project. Start
# it as often as you like: it goes on where an interrupted one stopped, and does nothing when nothing is to do.
# `scripts/setup.sh --help` says more.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# A PYTHONPATH of the caller's would shadow what is installed here.
unset PYTHONPATH PYTHONHOME

# The interpreter that an existing .venv was made with stays; otherwise the newest is taken.
existing="$("$root/.venv/bin/python" -c 'import sys; print(sys._base_executable)' 2>/dev/null)" || existing=""
candidates=(${existing:+"$existing"} python3.13 python3.12 python3.11 python3 python)
if [[ -n "${PYTHON:-}" ]]; then
    candidates=("$PYTHON")
fi
seen=""
for python in "${candidates[@]}"; do
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || version="missing"
    case "$version" in
        3.11 | 3.12 | 3.13) exec "$python" "$root/scripts/environment.py" "$@" ;;
    esac
    seen+="${seen:+, }$python is $version"
done
echo "setup: titan_rl needs Python 3.11, 3.12 or 3.13 ($seen): install one, or set PYTHON to the path of one." >&2
exit 2
