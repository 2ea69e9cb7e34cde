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
from collections import defaultdict
from collections.abc import Callable
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
_STAGES_SECONDS = 1.0
"""How long killed stages may take. Where process 1 reaps no orphans, as in some containers, their group stays."""
FORK_SERVER_SECONDS, FORK_SERVERS = 10.0, 3
"""So many fork servers, none of which lived for so long, and no more is started."""


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
        self._living: dict[str, dict[int, int]] = defaultdict(dict)  # by spawn: descriptor by process id
        self._over: set[str] = set()  # spawns
        for pipe in (life, self.births):
            os.mkfifo(pipe)
        # for both ends: without a writer every read would be an end of file, and without a reader none could be opened
        self._pipe = os.open(self.births, os.O_RDWR)
        self._life = os.open(life, os.O_RDWR)  # for as long as this process lives
        self._closed = False
        self._server_gone = threading.Event()
        start_thread("births", self._take_births, on_death=on_broken)
        keep = functools.partial(self._keep_fork_server, directory, stage, log, dict(os.environ))
        start_thread("fork server", keep, on_death=on_broken)

    def wake(self, spawn: str) -> None:
        """Continue processes that were stopped by SIGSTOP: they could not exit."""
        with self._lock:
            for descriptor in self._living[spawn].values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)

    def end(self, spawn: str, at_once: bool = False) -> None:
        """The spawn is over. Kills processes that still live, and those that register later, and returns when they are
        gone. May take seconds."""
        with self._lock:
            self._over.add(spawn)
            living = [os.dup(descriptor) for descriptor in self._living[spawn].values()]
        for descriptor in living:
            if not _ends_within(descriptor, 0 if at_once else _EXIT_MILLISECONDS):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        deadline = time.monotonic() + _GONE_SECONDS
        for descriptor in living:
            _ends_within(descriptor, max(0, int(1000 * (deadline - time.monotonic()))))
            os.close(descriptor)

    def close(self) -> None:
        """Nothing is watched any more. Processes that still live die. Returns when the fork server and its stages are
        gone, which takes as long as their memory is large."""
        self._closed = True
        os.write(self._pipe, b"\n")
        os.close(self._life)
        self._server_gone.wait(_GONE_SECONDS)

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
            os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
            if self._closed:
                return self._end_stages(server)
            how = ending_in_words(server.wait())
            _log.error("the fork server of this host %s; another one is started", how)
            died_early = died_early + 1 if time.monotonic() < began + FORK_SERVER_SECONDS else 0
        self._server_gone.set()
        raise RuntimeError(f"the fork server {how} {FORK_SERVERS} times in a row" + f"; see {log}" * bool(log))

    def _end_stages(self, server: subprocess.Popen[bytes]) -> None:
        """Those of a fork server that has ended and is not reaped: its process group, whose id nobody else gets before
        all are gone. By themselves they would die one after the other."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            deadline = time.monotonic() + _STAGES_SECONDS
            while time.monotonic() < deadline:
                os.killpg(server.pid, 0)
                time.sleep(0.005)
        self._server_gone.set()

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
            with self._lock:
                descriptor = self._living[spawn][pid] = os.pidfd_open(pid)
                answering.add(descriptor)
                if spawn in self._over:
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
        with self._lock:
            if (descriptor := self._living[spawn].pop(pid, None)) is not None:
                answering.discard(descriptor)
                os.close(descriptor)
        self._on_end(spawn, name, code)


def _ends_within(descriptor: int, milliseconds: int | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(milliseconds))
