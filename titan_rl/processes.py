"""Processes: end one with its parent, say how one ended, leave without delay, and join the ranks of one mesh. Standard
library only; `join_world` imports torch when it is called.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1

answering: set[int] = set()
"""Descriptors (pidfd) of children that answer SIGUSR1. It is passed on to them (`observability.waits`)."""


def process_control(option: int, value: int) -> None:
    """Linux's `prctl`.

    Raises:
        OSError: it failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with(parent_pid: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies, whatever else runs here meanwhile. A parent that
    died before this call sends none, so a process whose parent is another one ends here."""
    process_control(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent_pid:
        sys.exit("the parent died while its child process started")


def ending_in_words(code: int) -> str:
    """How a process ended; a signal is a negative code, as `subprocess` gives it."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


def leave(main: Callable[[], object]) -> NoReturn:
    """Run a program and end this process with its exit code, its `atexit` work done.

    The interpreter is not torn down. With torch in it that takes 1 to 10 s, signals have their deadly default again
    meanwhile, and a thread of Monarch's that comes back to Python aborts the process (SIGABRT, "FATAL: exception not
    rethrown").
    """
    code = 1
    try:
        try:
            result = main()
            code = result if isinstance(result, int) else 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except KeyboardInterrupt:  # before a run has armed its handlers
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever the words above met, a terminal that is gone for one
        os._exit(code)


OWNER = "TITAN_RL_OWNER"
"""Variable with a process id; see `owner_pid`."""


def owner_pid() -> int:
    """The process whose death makes the files in this host's shared memory rubbish: the controller on its own host, its
    agent on every other one. A process that nobody told of an owner is its own."""
    return int(os.environ.get(OWNER, os.getpid()))


RENDEZVOUS = "TITAN_RL_RENDEZVOUS"
"""Variable with the path of the file where the ranks of a mesh meet: a new one each time, in a private directory."""


def join_world(backend: str) -> None:
    """Start the default process group of torch.distributed, if there is none, without a port.

    RANK, WORLD_SIZE and, for more than one rank, RENDEZVOUS must be in the environment. The ranks meet over a file,
    because torch's usual store is a TCP server of rank 0 that listens on every interface and serves anyone.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.HashStore() if ranks == 1 else dist.FileStore(os.environ[RENDEZVOUS], ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
