"""The processes of a mesh: the program that each runs, and the watch over their start, stops and end on their host.

    python -m titan_rl.launch.child DIRECTORY SPAWN MESH RANK

- DIRECTORY has two named pipes of the watch's process: of the controller, or of the agent of another host. The kernel
  kills the process when the watch's process ends, whatever either is doing. Monarch alone would end it later, and not
  while it starts. So this module imports only the standard library.
- A process tells its process id through the pipe `births`, and then runs Monarch's main module. From then on a thread
  of the watch waits for it in the kernel, so that its end is known within milliseconds, whatever event loops are doing.
- SPAWN names one start of a mesh, and is never used again. A process that registers after its mesh was
  stopped is killed.
- Each end is reported once, with rank, process id and exit status. The thread waits without reaping; Monarch reaps the
  processes and is sometimes faster. Then the kernel still has the exit status from Linux 6.15 on, not before.
- A stopped process (SIGSTOP, a debugger's detach, Ctrl-Z) has not ended. The stop is reported, and the watch goes on.
- After `expect_ends` no end is reported.
- A line that is no birth is logged and left out. A process for which this one has no descriptor left is killed: its end
  would go unheard. A thread that dies itself is reported (`on_broken`).
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.processes import answering, die_with_owner, leave, start_thread

_log = logging.getLogger(__name__)

_INFO = struct.Struct("<Q52xi")
"""`struct pidfd_info` of linux/pidfd.h: the mask and, 60 bytes on, the exit code."""
_PIDFD_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_REAP_MILLISECONDS = 100
_EXIT_MILLISECONDS = 1000
"""How long a process of a stopped mesh may take to exit, and the kernel to end a killed one."""


@dataclass(slots=True)
class _Spawn:
    """The processes of one start of a mesh."""

    living: dict[int, int] = field(default_factory=dict)  # descriptor by process id
    ended: int = 0
    expected: bool = False
    over: bool = False


class ProcessWatch:
    """The watch over all processes of one host. Makes the pipes `life` and `births`. Callbacks are called from threads.

    Args:
        directory: of the pipes; private to this process.
        on_end: called with the spawn, the name of the ended process and its exit code (negative: a signal; None: not
            known).
        on_stop: called with a sentence when a process was stopped or goes on.
        on_broken: called with a sentence when a thread of the watch has died, so that ends may go unheard.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_end: Callable[[str, str, int | None], None],
        on_stop: Callable[[str], None],
        on_broken: Callable[[str], None],
    ) -> None:
        life, self.births = directory / "life", directory / "births"
        self._on_end = on_end
        self._on_stop = on_stop
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._spawns: dict[str, _Spawn] = {}
        for pipe in (life, self.births):
            os.mkfifo(pipe)
        # for both ends: without a writer every read would be an end of file
        self._pipe = os.open(self.births, os.O_RDWR)
        reading = os.open(life, os.O_RDONLY | os.O_NONBLOCK)  # without a reader it could not be opened
        self._life = os.open(life, os.O_WRONLY)  # for as long as this process lives
        os.close(reading)
        start_thread("births", self._take_births, on_death=on_broken)

    def any_ended(self, spawn: str) -> bool:
        """Whether a process of this spawn has ended, reported or not."""
        with self._of(spawn) as mine:
            return mine.ended > 0 or any(_has_ended(descriptor) for descriptor in mine.living.values())

    def expect_ends(self, spawn: str) -> None:
        """Report no ends from now on: the processes are about to be stopped. Processes stopped by SIGSTOP are
        continued, because they could not exit otherwise."""
        with self._of(spawn) as mine:
            mine.expected = True
            for descriptor in mine.living.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)

    def kill(self, spawn: str, after_milliseconds: int = 0) -> None:
        """Kill processes that still live then, and return when they are gone. Reports no ends from now on. May take
        seconds."""
        with self._of(spawn) as mine:
            mine.expected = True
            living = {pid: os.dup(descriptor) for pid, descriptor in mine.living.items()}
        for descriptor in living.values():
            if not _poll(descriptor, select.POLLIN, after_milliseconds):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                _poll(descriptor, select.POLLIN, _EXIT_MILLISECONDS)
            os.close(descriptor)

    def end(self, spawn: str) -> None:
        """The spawn is over. Kills processes that still live, and those that tell their birth later."""
        with self._of(spawn) as mine:
            mine.over = True
        self.kill(spawn, _EXIT_MILLISECONDS)

    def close(self) -> None:
        """Nothing is watched any more. Processes that still live die."""
        os.write(self._pipe, b"\n")
        os.close(self._life)

    @contextlib.contextmanager
    def _of(self, spawn: str) -> Iterator[_Spawn]:
        with self._lock:
            yield self._spawns.setdefault(spawn, _Spawn())

    def _take_births(self) -> None:
        with open(self._pipe, "rb", closefd=False) as births:
            for line in births:
                if line == b"\n":
                    return os.close(self._pipe)
                try:
                    spawn, mesh, rank, pid = line.decode().split()
                    if int(pid) < 1:  # a signal to it would reach others
                        raise ValueError(pid)
                    self._take_birth(spawn, f"{mesh} rank {rank} (pid {pid})", int(pid))
                except ValueError:
                    _log.error("no birth of a process: %r", line)

    def _take_birth(self, spawn: str, name: str, pid: int) -> None:
        try:
            with self._of(spawn) as mine:
                descriptor = mine.living[pid] = os.pidfd_open(pid)
                answering.add(descriptor)
                if mine.over:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return self._tell_end(spawn, name, pid, None)
        except OSError as error:  # no descriptor is left
            _log.error("%s cannot be watched and is killed: %s", name, error)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return self._tell_end(spawn, name, pid, -signal.SIGKILL)
        start_thread(name, functools.partial(self._wait, spawn, name, pid), on_death=self._on_broken)

    def _wait(self, spawn: str, name: str, pid: int) -> None:
        with self._of(spawn) as mine:
            descriptor = mine.living[pid]
        try:
            kind, status = _next_news(descriptor, os.WSTOPPED)
            while kind == os.CLD_STOPPED:
                if not mine.expected:
                    what = f"{name} was stopped by {signal.Signals(status).name}; waiting until it goes on"
                    _tell(self._on_stop, what)
                kind, status = _next_news(descriptor, os.WCONTINUED)
                if kind == os.CLD_CONTINUED:
                    os.waitid(os.P_PIDFD, descriptor, os.WCONTINUED | os.WNOHANG)  # consume it, or it is seen again
                    _tell(self._on_stop, f"{name} goes on")
                    kind, status = _next_news(descriptor, os.WSTOPPED)
            code: int | None = status if kind == os.CLD_EXITED else -status
        except ChildProcessError:  # Monarch was faster, or it is the child of another process: the host's worker
            _poll(descriptor, select.POLLIN, None)
            code = _exit_code(descriptor)
        self._tell_end(spawn, name, pid, code)

    def _tell_end(self, spawn: str, name: str, pid: int, code: int | None) -> None:
        with self._of(spawn) as mine:
            mine.ended += 1
            if (descriptor := mine.living.pop(pid, None)) is not None:
                answering.discard(descriptor)
                os.close(descriptor)
        if not mine.expected:
            _tell(self._on_end, spawn, name, code)


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


def _poll(descriptor: int, events: int, milliseconds: int | None) -> list[tuple[int, int]]:
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


def announce(births: str, *words: str) -> None:
    """Tell the watch this process's id. If nobody reads the pipe any more, this process ends."""
    try:
        descriptor = os.open(births, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no reader, or no file any more
        sys.exit("the owner died while its process started")
    os.write(descriptor, f"{' '.join(words)} {os.getpid()}\n".encode())
    os.close(descriptor)


def main() -> None:
    directory, spawn, mesh, rank = sys.argv[1:]
    die_with_owner(f"{directory}/life")
    for stop in (signal.SIGTERM, signal.SIGHUP):  # a job's scheduler sends them to all processes; the controller saves
        signal.signal(stop, lambda *_: None)  # not ignored: the programs that are started here would inherit that
        signal.siginterrupt(stop, False)
    from titan_rl.observability.waits import answer_signals  # only now: it imports asyncio

    answer_signals(f"{mesh} rank {rank}")
    announce(f"{directory}/births", spawn, mesh, rank)  # from now on it may be asked
    # `leave` skips the teardown of the interpreter: with torch it takes 1 to 10 s, and the controller waits for it.
    leave(functools.partial(runpy.run_module, MONARCH_MAIN, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
