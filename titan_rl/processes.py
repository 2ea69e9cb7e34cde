"""What the kernel does for processes: end one with its parent, and say how one ended. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


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
