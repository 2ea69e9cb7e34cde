"""Where a run is made: on this machine, or over several hosts, which are network namespaces of it.

The controller is on the first host. Every other one may have a worker, and the run is started over all of these. The
last one gets its worker when it joins, and one that was killed gets a new one then or at the next start of the run.
Processes of all hosts are seen from here. Shared memory, mounts and ports are a host's own: what is done with them is
done there (`there`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from tests.hosts.namespaces import Host

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
FIRST_PORT = 17_000
START_SECONDS = 60.0
"""Bound on the start of a worker."""
HOST_SECONDS = 4
"""`placement.host_seconds` of the run."""


class There(Protocol):
    """Calls a function where it sees a host's files and network."""

    def __call__(self, function: Callable[..., T], *args: Any) -> T: ...


def here(function: Callable[..., T], *args: Any) -> T:
    return function(*args)


@dataclass(slots=True)
class Worker:
    """A `titan-rl worker`."""

    host: Host
    address: str
    process: subprocess.Popen[Any]


class Ground:
    """
    Args:
        hosts: none: the run is made on this machine.
    """

    def __init__(self, hosts: Sequence[Host] = ()) -> None:
        self.hosts = list(hosts)
        self._workers: list[Worker] = []
        self._started = 0
        self._start: Callable[[Host, Sequence[str]], subprocess.Popen[Any]]
        self._output: Path

    @property
    def everywhere(self) -> list[There]:
        return [host.call for host in self.hosts] or [here]

    def there(self, pid: int) -> There:
        """The host of a process. Raises OSError if it is gone."""
        return next((host.call for host in self.hosts if host.holds(pid)), here)

    def is_controllers(self, pid: int) -> bool:
        """Whether a process is on the controller's host, and lives."""
        try:
            return not self.hosts or self.hosts[0].holds(pid)
        except OSError:
            return False

    def idle(self) -> set[int]:
        """Processes that serve no run by themselves."""
        return {worker.process.pid for worker in self._workers}

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], scratch: Path, output: Path
    ) -> subprocess.Popen[Any]:
        """Start the controller.

        Args:
            scratch: for temporary files.
            output: what it prints goes to the end of this file.
        """

        def start(host: Host | None, words: Sequence[str]) -> subprocess.Popen[Any]:
            own = scratch if host is None or host is self.hosts[0] else scratch / host.name
            own.mkdir(exist_ok=True)
            run: Callable[..., subprocess.Popen[Any]] = subprocess.Popen if host is None else host.run
            with output.open("ab") as file:
                return run(
                    [sys.executable, "-m", *words],
                    cwd=ROOT,
                    env={**environment, "TMPDIR": str(own)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

        if not self.hosts:
            return start(None, command)
        self._start, self._output = start, output
        for host in self._without_worker():
            if host is not self.hosts[-1]:
                self._lend(host)
        where = ["--placement.hosts", *(worker.address for worker in self._workers), "--trusted-network"]
        bound = ["--placement.host-seconds", str(HOST_SECONDS), "--rollout.agents.host", self.hosts[0].address]
        return start(self.hosts[0], [*command, *where, *bound])

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.process.terminate()
            worker.process.wait()
        self._workers.clear()

    def kill(self, run: Path, luck: float) -> str:
        """Kill everything on a host of the run. Raises LookupError if there is only the controller's."""
        worker = self._serving(run, luck)
        worker.host.kill()
        self._workers.remove(worker)
        return f"everything on {worker.host.name} ({worker.address}) was killed"

    def cut(self, run: Path, luck: float) -> tuple[str, Callable[[], None]]:
        """Cut a host off; returns also what mends the link. Raises LookupError as `kill` does."""
        worker = self._serving(run, luck)
        worker.host.cut()
        return f"the link of {worker.host.name} ({worker.address}) is cut", worker.host.mend

    def join(self, run: Path, luck: float) -> str:
        """Let a host join. Raises LookupError if all have a worker; OSError if the run does not take it."""
        if not (idle := self._without_worker()):
            raise LookupError("every host has a worker")
        worker = self._lend(idle[int(luck * len(idle))])
        words = ["-m", "titan_rl.cli", "fleet", str(run), "add", worker.address]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr)
        return f"{worker.host.name} joins: {'; '.join(done.stdout.splitlines())}"

    def _serving(self, run: Path, luck: float) -> Worker:
        from titan_rl.errors import TitanError
        from titan_rl.hosts.elastic import ask

        try:
            shown = "\n".join(ask(run, {"verb": "show", "names": []})["lines"])
        except TitanError as error:
            raise LookupError(str(error)) from error  # it is starting
        serving = [worker for worker in self._workers if f" at {worker.host.address}: " in shown]
        if not serving:
            raise LookupError("no host but the controller's serves the run")
        return serving[int(luck * len(serving))]

    def _without_worker(self) -> list[Host]:
        have = {worker.host.name for worker in self._workers}
        return [host for host in self.hosts[1:] if host.name not in have]

    def _lend(self, host: Host) -> Worker:
        """Start a worker, at a port that none had before; returns when it listens."""
        address = f"{host.address}:{FIRST_PORT + self._started}"
        self._started += 1
        process = self._start(host, ["titan_rl.cli", "worker", "--listen", address, "--trusted-network"])
        until = time.monotonic() + START_SECONDS
        while f"listens on {address} " not in self._output.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > until:
                raise OSError(f"the worker of {host.name} does not listen: see {self._output}")
            time.sleep(0.02)
        worker = Worker(host, address, process)
        self._workers.append(worker)
        return worker


def inner_pid(pid: int) -> int:
    """The id that a process has on its own host."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


def lives(pid: int) -> bool:
    """Also of processes that /proc does not show there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
