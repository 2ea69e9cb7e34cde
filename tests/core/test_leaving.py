"""How the controller's process ends when Monarch's runtime does not (4 s)."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
from monarch._src.actor.future import Future

from titan_rl.hosts.host import Host
from titan_rl.processes import run_and_exit
from titan_rl.supervision.provisioner import all_light


def late(future, timeout=None):
    Future.get = in_time
    raise TimeoutError("the host is busy")


def main():
    global in_time
    Host(stage=all_light, log_directory="", on_end=print, on_broken=print).mesh()
    in_time, Future.get = Future.get, late
    return 7


run_and_exit(main)
"""


def test_a_runtime_that_ends_late_leaves_no_traceback_on_the_terminal(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7 and "Traceback" not in done.stderr, done.stderr
