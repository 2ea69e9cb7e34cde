"""What every process of a mesh runs: `python -m titan_rl.launch.child CONTROLLER_PID PIPE MESH RANK`.

Before anything else it binds its life to the controller's and says there which process it is (`process_watch`). Then it
is Monarch's: that by itself would only do the first, after half a second of imports in which a controller that is
killed leaves an orphan. Imports nothing but the standard library before that; and the arguments tell whoever looks at
`ps` which process is which.
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
    """Tell the controller this rank's process id. A pipe that nobody reads any more ends this process."""
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
    # Whoever stops this process waits for its end: to tear down an interpreter with torch in it takes 1 to 10 s.
    leave(functools.partial(runpy.run_module, MONARCH_MAIN, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
