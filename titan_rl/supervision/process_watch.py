"""The watch over the processes of a host's meshes: their start, stops and end, and the fork server that they come from.

- DIRECTORY has two named pipes of the watch's process: of the controller, or of the agent of another host. The kernel
  kills the fork server and all processes when the watch's process ends, whatever any of them is doing. Monarch alone
  would end them later, and not while they start.
- A process tells its process id through the pipe `births`, and then runs Monarch's main module. From then on a thread
  of the watch waits for it in the kernel, so that its end is known within milliseconds, whatever event loops are doing.
- A spawn names one start of a mesh, and is never used again. A process that registers after its mesh was
  stopped is killed.
- Each end is reported once, with rank, process id and exit status. The status is read before the process is reaped,
  which the fork server takes its time for. It is not known if the fork server was killed before.
- A stopped process (SIGSTOP, a debugger's detach, Ctrl-Z) has not ended.
- After `expect_ends` no end is reported.
- A line that is no birth is logged and left out. A process for which this one has no descriptor left is killed: its end
  would go unheard. A thread that dies itself is reported (`on_broken`), and so is a fork server that dies at every
  start.
"""

import contextlib
import functools
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from titan_rl.processes import answering, ending_in_words, start_thread
from titan_rl.supervision.fork_server import Stage
from titan_rl.supervision.proxy import exit_status

_log = logging.getLogger(__name__)

_EXIT_MILLISECONDS = 1000
"""How long a process of a stopped mesh may take to exit."""
_GONE_SECONDS = 8.0
"""How long killed ones may take, less than a call to a host's agent. First the driver takes back their device memory,
which those that follow them need."""
FORK_SERVER_SECONDS, FORK_SERVERS = 10.0, 3
"""So many fork servers, none of which lived for so long, and no more is started."""


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
        log: file for what is printed while it imports; empty: the terminal.
        on_end: called with the spawn, the name of the ended process and its exit code (negative: a signal; None: not
            known).
        on_broken: called with a sentence when a thread of the watch has died, so that ends may go unheard.
    """

    def __init__(
        self,
        directory: Path,
        stage: Stage,
        log: str = "",
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
        self._closed = False
        start_thread("births", self._take_births, on_death=on_broken)
        keep = functools.partial(self._keep_fork_server, directory, stage, log, dict(os.environ))
        start_thread("fork server", keep, on_death=on_broken)

    def any_ended(self, spawn: str) -> bool:
        """Whether a process of this spawn has ended, reported or not."""
        with self._of(spawn) as mine:
            return mine.ended > 0 or any(_ends_within(descriptor, 0) for descriptor in mine.living.values())

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
            if not _ends_within(descriptor, after_milliseconds):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        deadline = time.monotonic() + _GONE_SECONDS
        for descriptor in living:
            _ends_within(descriptor, max(0, int(1000 * (deadline - time.monotonic()))))
            os.close(descriptor)

    def close(self) -> None:
        """Nothing is watched any more. Processes that still live die."""
        self._closed = True
        os.write(self._pipe, b"\n")
        os.close(self._life)

    @contextlib.contextmanager
    def _of(self, spawn: str) -> Iterator[_Spawn]:
        with self._lock:
            yield self._spawns.setdefault(spawn, _Spawn())

    def _keep_fork_server(self, directory: Path, stage: Stage, log: str, environment: dict[str, str]) -> None:
        """`environment`: not this process's own, which another thread may be changing."""
        module, encoded = "titan_rl.supervision.fork_server", msgspec.json.encode(stage).decode()
        command = [sys.executable, "-m", module, str(directory), encoded]
        if log:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
        died_early = 0
        while died_early < FORK_SERVERS:
            began = time.monotonic()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if log else None
            server = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )
            if output is not None:
                os.close(output)
            how = ending_in_words(server.wait())
            if self._closed:
                return
            _log.error("the fork server of this host %s; another one is started", how)
            died_early = died_early + 1 if time.monotonic() < began + FORK_SERVER_SECONDS else 0
        raise RuntimeError(f"the fork server {how} {FORK_SERVERS} times in a row" + f"; see {log}" * bool(log))

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
        start_thread(name, functools.partial(self._wait, spawn, name, pid, descriptor), on_death=self._on_broken)

    def _wait(self, spawn: str, name: str, pid: int, descriptor: int) -> None:
        _ends_within(descriptor, None)
        status = exit_status(pid, descriptor)
        self._tell_end(spawn, name, pid, None if status is None else os.waitstatus_to_exitcode(status))

    def _tell_end(self, spawn: str, name: str, pid: int, code: int | None) -> None:
        with self._of(spawn) as mine:
            mine.ended += 1
            if (descriptor := mine.living.pop(pid, None)) is not None:
                answering.discard(descriptor)
                os.close(descriptor)
        if not mine.expected:
            self._on_end(spawn, name, code)


def _ends_within(descriptor: int, milliseconds: int | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(milliseconds))
