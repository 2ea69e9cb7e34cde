"""The processes of a mesh: the program that each runs, and the watch over their start, stops and end on their host.

    python -m titan_rl.supervision.child DIRECTORY SPAWN MESH RANK

- DIRECTORY has two named pipes of the watch's process: of the controller, or of the agent of another host. The kernel
  kills the process when the watch's process ends, whatever either is doing. Monarch alone would end it later, and not
  while it starts. So this module imports only the standard library.
- A process tells its process id through the pipe `births`, and then runs Monarch's main module. From then on a thread
  of the watch waits for it in the kernel, so that its end is known within milliseconds, whatever event loops are doing.
- SPAWN names one start of a mesh, and is never used again. A process that registers after its mesh was
  stopped is killed.
- Each end is reported once, with rank, process id and exit status. The thread waits without reaping; Monarch reaps the
  processes and is sometimes faster. Then the kernel still has the exit status from Linux 6.15 on, not before.
- A stopped process (SIGSTOP, a debugger's detach, Ctrl-Z) has not ended.
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

from titan_rl.processes import answering, die_with_owner, run_and_exit, start_thread

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
        on_broken: called with a sentence when a thread of the watch has died, so that ends may go unheard.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_end: Callable[[str, str, int | None], object],
        on_broken: Callable[[str], object],
    ) -> None:
        life, self.births = directory / "life", directory / "births"
        self._on_end = on_end
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
            return mine.ended > 0 or any(_poll(descriptor, select.POLLIN, 0) for descriptor in mine.living.values())

    def expect_ends(self, spawn: str, kill: bool = False) -> None:
        """Report no ends from now on: the processes are about to be stopped. Processes stopped by SIGSTOP are
        continued, because they could not exit otherwise. May take seconds if it is to kill them."""
        with self._of(spawn) as mine:
            mine.expected = True
            for descriptor in mine.living.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        if kill:
            self._kill(spawn, after_milliseconds=0)

    def end(self, spawn: str) -> None:
        """The spawn is over. Kills processes that still live, and those that register later. May take seconds."""
        with self._of(spawn) as mine:
            mine.over = mine.expected = True
        self._kill(spawn, after_milliseconds=_EXIT_MILLISECONDS)

    def _kill(self, spawn: str, *, after_milliseconds: int) -> None:
        """Kill processes that still live then, and return when they are gone."""
        with self._of(spawn) as mine:
            living = [os.dup(descriptor) for descriptor in mine.living.values()]
        for descriptor in living:
            if not _poll(descriptor, select.POLLIN, after_milliseconds):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                _poll(descriptor, select.POLLIN, _EXIT_MILLISECONDS)
            os.close(descriptor)

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
                except ValueError:
                    _log.error("no birth of a process: %r", line)
                else:
                    self._take_birth(spawn, f"{mesh} rank {rank} (pid {pid})", int(pid))

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
        self._tell_end(spawn, name, pid, _exit_code(descriptor))

    def _tell_end(self, spawn: str, name: str, pid: int, code: int | None) -> None:
        with self._of(spawn) as mine:
            mine.ended += 1
            if (descriptor := mine.living.pop(pid, None)) is not None:
                answering.discard(descriptor)
                os.close(descriptor)
        if not mine.expected:
            self._on_end(spawn, name, code)


def _poll(descriptor: int, events: int, milliseconds: int | None) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(descriptor, events)
    return poll.poll(milliseconds)


def _exit_code(pidfd: int) -> int | None:
    """Wait for the end of a process without reaping it; returns its exit code, or None if somebody else has reaped it
    and the kernel does not keep the code (before Linux 6.15)."""
    try:
        if (end := os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)) is not None:
            return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    except ChildProcessError:  # Monarch was faster, or it is the child of another process: the host's worker
        _poll(pidfd, select.POLLIN, None)
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
    from titan_rl.metrics.waits import answer_signals  # only now: it imports asyncio

    answer_signals(f"{mesh} rank {rank}")
    announce(f"{directory}/births", spawn, mesh, rank)  # from now on it may be asked
    # without the teardown of the interpreter: with torch it takes 1 to 10 s, and the controller waits for it
    run_and_exit(functools.partial(runpy.run_module, MONARCH_MAIN, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
