"""The program of every process of a mesh: `python -m titan_rl.launch.child CONTROLLER_PID PIPE MESH RANK`.

First it makes the kernel kill it when the controller dies, and tells the controller its process id (`process_watch`).
Then it runs Monarch's main module. Monarch alone would only do the former, and only after half a second of imports, in
which a killed controller would leave an orphan. Until then this module imports only the standard library. The arguments
make the processes recognisable in `ps`.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys

from titan_rl.processes import die_with, leave

MONARCH_MAIN = "monarch._src.actor.bootstrap_main"
"""What `monarch.actor.default_bootstrap_cmd()` runs; a test compares."""


def announce(pipe: str, rank: str) -> None:
    """Tell the controller this rank's process id. If nobody reads the pipe any more, this process ends."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no reader, or no file any more
        sys.exit("the mesh was stopped while its process started")
    os.write(descriptor, f"{rank} {os.getpid()}\n".encode())
    os.close(descriptor)


def main() -> None:
    controller_pid, pipe, _, rank = sys.argv[1:]
    die_with(int(controller_pid))
    announce(pipe, rank)
    # `leave` skips the teardown of the interpreter: with torch it takes 1 to 10 s, and the controller waits for it.
    leave(functools.partial(runpy.run_module, MONARCH_MAIN, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
