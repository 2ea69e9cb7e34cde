"""The processes of a mesh: the program that each runs, and the controller's watch over their start, stops and end.

    python -m titan_rl.launch.child CONTROLLER_PID PIPE MESH RANK

- A process first makes the kernel kill it when the controller dies, and tells its process id through the pipe. Then it
  runs Monarch's main module. Monarch alone would only do the former, and only after half a second of imports, in which
  a killed controller would leave an orphan. So this module imports only the standard library.
- From then on a thread of the controller waits for the process in the kernel, so that its end is known within
  milliseconds, whatever the event loops are doing.
- Each end is reported once, with rank, process id and exit status. The thread waits without reaping; Monarch reaps the
  processes and is sometimes faster. Then the kernel still has the exit status from Linux 6.15 on, not before.
- A stopped process (SIGSTOP, a debugger's detach, Ctrl-Z) has not ended. The stop is reported, and the watch goes on.
- After `expect_ends` no end is reported.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import runpy
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from titan_rl.processes import answering, die_with, leave

_log = logging.getLogger(__name__)

_INFO = struct.Struct("<Q52xi")
"""`struct pidfd_info` of linux/pidfd.h: the mask and, 60 bytes on, the exit code."""
_PIDFD_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_REAP_MILLISECONDS = 100
_EXIT_MILLISECONDS = 1000
"""How long a process of a stopped mesh may take to exit, and the kernel to end a killed one."""


class ProcessWatch:
    """Makes `pipe`, into which the processes write their ids. Both callbacks are called from threads.

    Args:
        mesh: name of the mesh, for messages.
        on_end: called with the name of the ended process and its exit code (negative: a signal; None: not known).
        on_stop: called with a sentence when a process was stopped or goes on.
    """

    def __init__(
        self,
        mesh: str,
        pipe: Path,
        *,
        on_end: Callable[[str, int | None], None],
        on_stop: Callable[[str], None],
    ) -> None:
        self._mesh = mesh
        self._on_end = on_end
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._living: dict[int, int] = {}  # descriptor by process id
        self._ended = 0
        self._expected = False
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR)  # for writing too: without a writer every read would be an end of file
        threading.Thread(target=self._take_births, name=f"{mesh} births", daemon=True).start()

    @property
    def any_ended(self) -> bool:
        """Whether a process has ended, reported or not."""
        with self._lock:
            return self._ended > 0 or any(_has_ended(descriptor) for descriptor in self._living.values())

    def expect_ends(self) -> None:
        """Report no ends from now on: the processes are about to be stopped. Processes stopped by SIGSTOP are
        continued, because they could not exit otherwise."""
        self._expected = True
        with self._lock:
            for descriptor in self._living.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)

    def kill(self, after_milliseconds: int = 0) -> None:
        """Kill processes that still live then, and return when they are gone. Reports no ends from now on. May take
        seconds."""
        self._expected = True
        with self._lock:
            for descriptor in self._living.values():
                if not _poll(descriptor, select.POLLIN, after_milliseconds):
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    _poll(descriptor, select.POLLIN, _EXIT_MILLISECONDS)

    def end(self) -> None:
        """Stop watching. Kills processes that still live."""
        self.kill(_EXIT_MILLISECONDS)
        os.write(self._pipe, b"\n")

    def _take_births(self) -> None:
        with open(self._pipe, "rb") as births:
            for line in births:
                if line == b"\n":
                    return
                rank, pid = map(int, line.split())
                name = f"{self._mesh} rank {rank} (pid {pid})"
                try:
                    with self._lock:
                        self._living[pid] = os.pidfd_open(pid)
                        answering.add(self._living[pid])
                except ProcessLookupError:
                    self._ended += 1
                    self._tell_end(name, None)
                    continue
                threading.Thread(target=self._wait, args=(name, pid), name=name, daemon=True).start()

    def _wait(self, name: str, pid: int) -> None:
        descriptor = self._living[pid]
        try:
            kind, status = _next_news(descriptor, os.WSTOPPED)
            while kind == os.CLD_STOPPED:
                if not self._expected:
                    what = f"{name} was stopped by {signal.Signals(status).name}; waiting until it goes on"
                    _tell(self._on_stop, what)
                kind, status = _next_news(descriptor, os.WCONTINUED)
                if kind == os.CLD_CONTINUED:
                    os.waitid(os.P_PIDFD, descriptor, os.WCONTINUED | os.WNOHANG)  # consume it, or it is seen again
                    _tell(self._on_stop, f"{name} goes on")
                    kind, status = _next_news(descriptor, os.WSTOPPED)
            code: int | None = status if kind == os.CLD_EXITED else -status
        except ChildProcessError:  # Monarch was faster
            code = _exit_code(descriptor)
        with self._lock:
            self._ended += 1
            answering.discard(descriptor)
            os.close(self._living.pop(pid))
        self._tell_end(name, code)

    def _tell_end(self, name: str, code: int | None) -> None:
        if not self._expected:
            _tell(self._on_end, name, code)


def _tell(listener: Callable[..., None], *news: object) -> None:
    try:
        listener(*news)
    except Exception:  # otherwise the thread would end and later ends would go unreported
        _log.exception("nobody heard that %s", news[0])


def _next_news(pidfd: int, besides_end: int) -> tuple[int, int]:
    """Wait for the process's end or for an event of the `waitid` flag `besides_end`, without consuming it."""
    news = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | besides_end | os.WNOWAIT)
    assert news is not None  # only WNOHANG gives that
    return news.si_code, news.si_status


def _has_ended(pidfd: int) -> bool:
    return bool(_poll(pidfd, select.POLLIN, 0))


def _poll(descriptor: int, events: int, milliseconds: int) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(descriptor, events)
    return poll.poll(milliseconds)


def _exit_code(pidfd: int) -> int | None:
    """Exit code of a process that was already reaped; None if the kernel does not keep it (before Linux 6.15)."""
    _poll(pidfd, 0, _REAP_MILLISECONDS)  # waits for the hang-up: the process is being reaped right now
    info = bytearray(_INFO.pack(_PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, status = _INFO.unpack(info)
    return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None


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
    controller_pid, pipe, mesh, rank = sys.argv[1:]
    die_with(int(controller_pid))
    from titan_rl.observability.waits import answer_signals  # only now: it imports asyncio

    answer_signals(f"{mesh} rank {rank}")
    announce(pipe, rank)  # from now on it may be asked
    # `leave` skips the teardown of the interpreter: with torch it takes 1 to 10 s, and the controller waits for it.
    leave(functools.partial(runpy.run_module, MONARCH_MAIN, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
