"""The process between the host and one forked process. It runs no user code and cleans up after the forked process.

    host ── keeper ── process that runs user code ── processes that it starts

- The keeper is a "subreaper": every process that user code starts, in any session, becomes the keeper's child when its
  parent ends, so the keeper finds all of them. It kills only its own unreaped children, so it cannot hit a reused id.
- It ends its process when the host says so (SIGTERM) or dies (the kernel then sends SIGTERM). It exits when all
  processes are gone, with an exit code as shells give it: that of the process, or 128 + the signal that killed it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from typing import NoReturn

from titan_rl.processes import die_with, ending_in_words, process_control

KEEPER_SIGNALS = frozenset({signal.SIGTERM, signal.SIGCHLD})
"""Signals that a keeper waits for. They must be blocked before it is forked."""

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALLED = 128


def keep(host_pid: int, let_go: Callable[[], None], work: Callable[[], None], close: Callable[[], None]) -> NoReturn:
    """Run the keeper, in a process just forked with `KEEPER_SIGNALS` blocked.

    Args:
        let_go: closes descriptors of the host.
        work: runs in the kept process.
        close: closes descriptors that only the kept process needs.
    """
    try:
        let_go()
        os.setsid()
        signal.set_wakeup_fd(-1)
        process_control(_PR_SET_CHILD_SUBREAPER, 1)
        die_with(host_pid, signal.SIGTERM)
        keeper_pid = os.getpid()
        kept_pid = os.fork()
        if kept_pid == 0:
            _run(keeper_pid, work)
        close()
        code = os.waitstatus_to_exitcode(_wait_for(kept_pid))
        os._exit(code if code >= 0 else _SIGNALLED - code)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def how_it_ended(keeper_status: int) -> str:
    """How the kept process ended, in words, from its keeper's wait status."""
    code = os.waitstatus_to_exitcode(keeper_status)
    return ending_in_words(_SIGNALLED - code if _SIGNALLED < code <= _SIGNALLED + signal.SIGRTMAX else code)


def _run(keeper_pid: int, work: Callable[[], None]) -> NoReturn:
    try:
        os.setsid()
        die_with(keeper_pid)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, KEEPER_SIGNALS)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _wait_for(kept_pid: int) -> int:
    """Wait until the process has ended, by itself or at the host's request, and all processes that it started are gone.
    Returns its wait status."""
    while os.waitid(os.P_PID, kept_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if signal.sigwait(KEEPER_SIGNALS) == signal.SIGTERM:
            break
    with contextlib.suppress(ProcessLookupError):  # it may not have made its process group yet
        os.killpg(kept_pid, signal.SIGKILL)
    status = 0
    while True:
        try:
            pid, ended_with = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                for child in _children():
                    os.kill(child, signal.SIGKILL)
                pid, ended_with = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == kept_pid:
            status = ended_with


def _children() -> list[int]:
    """This process's children, with zombies. Found by reading all of /proc, because not every kernel lists children."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                if parent == os.getpid():
                    children.append(int(entry))
    return children
