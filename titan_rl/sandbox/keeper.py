"""Stands between the host and one forked process, runs no user code, and leaves nothing behind.

    host ── keeper ── process that runs user code ── whatever it starts

- Whatever user code starts, in whatever session, becomes the keeper's child when its parent ends (the keeper is a
  "subreaper"), so the keeper finds all of it.
  It kills only its own unreaped children, so no id can be another's.
- It ends the process when the host says so (SIGTERM) or dies (the kernel says so then), and ends itself when all is
  gone, with an exit code as shells give it: that of the process, or 128 + the signal that killed it.
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
"""Blocked in a keeper, which waits for them; whoever forks one blocks them before."""

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALLED = 128


def keep(host_pid: int, let_go: Callable[[], None], work: Callable[[], None], close: Callable[[], None]) -> NoReturn:
    """Be a keeper, in a process just forked with `KEEPER_SIGNALS` blocked.

    Args:
        let_go: closes what is the host's.
        work: runs in the process that is kept.
        close: closes what is that process's, and not the keeper's.
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
    """How the process that a keeper kept ended, in words, from the keeper's wait status."""
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
    """Until the process has ended, by itself or because the host asked, and all that it started is gone; its status."""
    while os.waitid(os.P_PID, kept_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if signal.sigwait(KEEPER_SIGNALS) == signal.SIGTERM:
            break
    with contextlib.suppress(ProcessLookupError):  # it may not have come to have a group of its own
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
    """This process's children, zombies included. Read from all processes: not every kernel lists children."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                if parent == os.getpid():
                    children.append(int(entry))
    return children
