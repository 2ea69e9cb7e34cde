"""Stands between the host and one play, a process of its own that runs no user code, and leaves nothing behind.

    host ── keeper ── play ── whatever it starts

- Whatever a play starts, in whatever session, becomes the keeper's child when its parent ends (it is a "subreaper"), so
  the keeper finds all of it; nothing is killed that is not its own unreaped child, so no id can be another's by then.
- It ends the play when the host says so (SIGTERM) or dies (the kernel says so then), and ends itself when all is gone.
- The play's result is in the box, a file in memory: first the status it ended with, which the keeper writes, then what
  the play wrote, which nobody unpickles here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from titan_rl.processes import die_with, process_control

KEEPER_SIGNALS = frozenset({signal.SIGTERM, signal.SIGCHLD})
"""Blocked in a keeper, which waits for them; whoever forks one blocks them before."""

_PR_SET_CHILD_SUBREAPER = 36
_STATUS = struct.Struct("<i")


class Outcome(NamedTuple):
    """How a play ended."""

    status: int
    """Exit code; a signal is negative."""
    written: bytes
    """What it left in the box; whole if the status is 0."""


def make_box() -> int:
    """A new box: its descriptor."""
    return os.memfd_create("titan_rl_play")


def put_in_box(box: int, written: bytes) -> None:
    """What a play leaves."""
    rest, at = memoryview(written), _STATUS.size
    while rest:
        done = os.pwrite(box, rest, at)
        rest, at = rest[done:], at + done


def look_into_box(box: int) -> Outcome | None:
    """None where the keeper was killed, so that nobody knows how the play ended."""
    with open(box, "rb", closefd=False) as file:
        file.seek(0)
        content = file.read()
    if len(content) < _STATUS.size:
        return None
    (status,) = _STATUS.unpack_from(content)
    return Outcome(status, content[_STATUS.size :])


def keep(host_pid: int, box: int, let_go: Callable[[], None], play: Callable[[], None]) -> NoReturn:
    """Be the keeper of a play, in a process just forked with `KEEPER_SIGNALS` blocked.

    Args:
        let_go: closes what is the host's.
        play: puts the result into the box.
    """
    try:
        let_go()
        os.setsid()
        signal.set_wakeup_fd(-1)
        process_control(_PR_SET_CHILD_SUBREAPER, 1)
        die_with(host_pid, signal.SIGTERM)
        keeper_pid = os.getpid()
        play_pid = os.fork()
        if play_pid == 0:
            _be_the_play(keeper_pid, play)
        status = _wait_for(play_pid)
        os.pwrite(box, _STATUS.pack(os.waitstatus_to_exitcode(status)), 0)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _be_the_play(keeper_pid: int, play: Callable[[], None]) -> NoReturn:
    try:
        os.setsid()
        die_with(keeper_pid)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, KEEPER_SIGNALS)
        play()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _wait_for(play_pid: int) -> int:
    """Until the play has ended, by itself or because the host asked, and all that it started is gone; its status."""
    while os.waitid(os.P_PID, play_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if signal.sigwait(KEEPER_SIGNALS) == signal.SIGTERM:
            break
    with contextlib.suppress(ProcessLookupError):  # it may not have come to have a group of its own
        os.killpg(play_pid, signal.SIGKILL)
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
        if pid == play_pid:
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


def flush_output() -> None:
    """What was printed and is still in this process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by user code, or nobody reads it any more
            stream.flush()
