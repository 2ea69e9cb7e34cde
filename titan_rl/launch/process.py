"""One process by itself: its environment and log file, its scratch directory, and the signals of the controller.

- The controller prepares itself before it imports Monarch, every other process before any actor starts.
- The scratch directory holds files that must not outlive the process: sockets, rendezvous files, temporary files. The
  kernel takes the lock on it away with the process; a directory that a killed one left is removed by the next.
- Signals wait from `hold_signals` on until `StopSignals` hears them: there is no event loop yet that could. The first
  SIGINT, SIGTERM or SIGHUP ends the work in hand; what follows (saving the weights, closing) goes on. Each further one
  only skips the saving. None ever interrupts the closing, and none kills this process: the handlers stay until
  `processes.leave` ends it.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import functools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from titan_rl.errors import Stopped, TitanError
from titan_rl.importing import import_user_module
from titan_rl.launch.placement import SUPERVISION_ENVIRONMENT
from titan_rl.observability.logs import redirect_output

PREFIX = "titan_rl-"
LONGEST_PARENT = 40
"""Bytes of TMPDIR, which is not used if it is longer: the path of a socket has room for 107, and Monarch's and vLLM's
are up to 63 longer."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def prepare_controller() -> None:
    """Call before anything that imports Monarch."""
    if "monarch" in sys.modules and not SUPERVISION_ENVIRONMENT.items() <= os.environ.items():
        logging.getLogger(__name__).warning(
            "monarch was imported before titan_rl.launch: a process that is stopped for 30 s will be taken for dead"
        )
    os.environ.update(SUPERVISION_ENVIRONMENT)


def prepare_process(mesh: str, log_directory: str, imports: tuple[str, ...]) -> None:
    """Give the process its log file and import the user's modules under the names that pickled objects expect.

    Args:
        mesh: name of the mesh, for the file name; the rank comes from the environment.
        log_directory: of the run; empty: leave standard output alone.
        imports: files or modules of the user, in order.
    """
    if log_directory:
        rank = os.environ.get("RANK", "0")
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        redirect_output(Path(log_directory) / (f"{mesh}.log" if alone else f"{mesh}-rank{rank}.log"))
    for name in imports:
        import_user_module(name)


@functools.cache
def scratch_directory() -> Path:
    """The directory, made at the first call and removed when this process exits."""
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > LONGEST_PARENT:
        parent = Path("/tmp")
    sweep_dead_scratch(parent)
    # It gets the name by which others look for it only when it is locked.
    made = Path(tempfile.mkdtemp(prefix=".", dir=parent))
    fcntl.flock(os.open(made, os.O_RDONLY), fcntl.LOCK_EX)  # for as long as this process lives
    directory = made.rename(parent / f"{PREFIX}{os.getpid()}{made.name}")
    atexit.register(_remove, directory, os.getpid())
    return directory


def _remove(directory: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # and not a fork of it
        shutil.rmtree(directory, ignore_errors=True)


def sweep_dead_scratch(parent: Path) -> list[Path]:
    """Remove what this user's dead processes left; returns which directories."""
    removed = []
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another process swept it first, or it is another user's
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
    return removed


def hold_signals() -> None:
    """Keep signals waiting until `StopSignals`. Call it in the main thread, before any process is spawned."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


class StopSignals:
    """Passes each signal on as `Stopped`, in the main thread, also while the event loop sleeps."""

    def __init__(self, report: Callable[[TitanError], None]) -> None:
        """Call it in the main thread, in the event loop of the run.

        Args:
            report: told of every signal.
        """
        self._report = report
        self._waking, signalled = socket.socketpair()
        for end in (self._waking, signalled):
            end.setblocking(False)
        # Any thread may be the one that the kernel interrupts; this byte wakes the loop, whose thread runs the handler.
        # `loop.add_signal_handler` does the same, but takes its handlers away when the loop is closed.
        asyncio.get_running_loop().add_reader(self._waking, lambda: self._waking.recv(64))
        signal.set_wakeup_fd(signalled.detach(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has set it
                signal.signal(number, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _forget_terminal()
        self._report(Stopped(number))


def _forget_terminal() -> None:
    """Once the terminal is gone every word to it is an error, which would end the run in the middle of its clean-up."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
