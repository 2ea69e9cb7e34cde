"""Another host of a run, by calls to its agent.

    attach ─▶ agent ─▶ introduction ─▶ pulses … ─▶ lost: its meshes are lost with it      detach: the worker waits again

- A host that answers no pulse for `placement.host_seconds` is lost, and so is one whose agent has ended. It is reported
  once, and never used again; a worker that is attached again is a new host.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import queue
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from monarch.actor import attach_to_workers

from titan_rl.errors import ActorGone, CallTimeout, ConfigError, HostLost, TitanError
from titan_rl.hosts.agent import HostAgent, Introduction, News, digest_of, prepare_agent, versions
from titan_rl.hosts.facts import transport
from titan_rl.hosts.host import Ended, Host
from titan_rl.metrics.timeline import Pulse
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.processes import start_thread
from titan_rl.rpc.connection import Connection, bounded
from titan_rl.rpc.mesh_client import LOOKS, until_still

FACTS_SECONDS = 40.0
"""Bound on what an agent finds out of its host: `nvidia-smi` alone may take 30 s."""
REACH_SECONDS = 3.0
"""Bound on the first packet from a host."""
LARGE_BYTES = 64 << 10
"""More than any packet holds."""
CALL_SECONDS = 10.0
"""Bound on any other call to an agent. What a worker answers by itself may take half of it."""
LEASE = 3
"""An agent ends when it hears nothing for so many times `placement.host_seconds`: longer than the controller waits for
it, so that a controller which is only slow loses no host. One whose process is gone is not waited for."""
LEAST_BYTES, MOST_BYTES = 16 << 10, 1 << 20
"""The least takes a quarter of a second at 0.5 Mbit/s."""
CLOCK_SECONDS = 5.0
"""How far the clocks of two hosts may differ: logs and metrics are read side by side."""

_log = logging.getLogger(__name__)
_serial = itertools.count()


class Pace:
    """How many bytes go with the next pulse: few after a late one, so that they never make a link look dead.

    with pace as nbytes: await pulse(nbytes)        16 KiB, 32 KiB, … 1 MiB, late, 16 KiB, 32 KiB, …
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            seconds: bound of `until_still`.
        """
        self._late_seconds = seconds / LOOKS / 2
        self._clock = clock
        self._nbytes = LEAST_BYTES
        self._began = 0.0

    def __enter__(self) -> int:
        self._began = self._clock()
        return self._nbytes

    def __exit__(self, *error: object) -> None:
        late = self._clock() - self._began > self._late_seconds
        self._nbytes = LEAST_BYTES if late else min(MOST_BYTES, 2 * self._nbytes)


class ShippedLogs:
    """Writes what agents send of their files, in a thread: a disk that stalls keeps nobody from hearing the pulse.

    Args:
        directory: of log files.
        on_death: called with a sentence if nothing is written any more.
    """

    def __init__(self, directory: str, on_death: Callable[[str], None]) -> None:
        self._directory = Path(directory)
        self._news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._taken = self._written = 0  # bytes; each counter has one thread
        self._thread = start_thread("shipped logs", self._write, on_death=on_death)

    @property
    def has_room(self) -> bool:
        """Whether more may be asked for."""
        return self._taken - self._written < MOST_BYTES

    def put(self, news: News) -> None:
        """Never waits."""
        self._taken += len(news.text)
        self._news.put(news)

    def close(self, seconds: float) -> None:
        """Wait until all is written, but no longer than this."""
        self._news.put(None)
        self._thread.join(seconds)

    def _write(self) -> None:
        while (news := self._news.get()) is not None:
            with suppress(OSError), open(self._directory / news.of, "ab") as log:
                log.write(news.text)
            self._written += len(news.text)


class AttachedHost(Host):
    """A host with a worker.

    Args:
        name: of the host in this run.
        worker: ADDRESS:PORT.
        log_directory: of the run, which it names; empty: logs are not shipped.
        spans: whether timelines are shipped with them.
        controller: address and port at which the controller listens.
        silent_seconds: a host that answers nothing for so long is lost (`placement.host_seconds`).
        on_end: called with the end of a process.
        on_lost: called once, when the host is lost.
    """

    def __init__(
        self,
        name: str,
        worker: str,
        *,
        log_directory: str,
        spans: bool,
        controller: tuple[str, int],
        silent_seconds: float,
        on_end: Ended,
        on_lost: Callable[[AttachedHost], None],
    ) -> None:
        self._name, self.worker = name, worker
        self.label = f"{name} ({worker})"
        self._log_directory, self._spans = log_directory, spans
        self._silent_seconds, self._controller = silent_seconds, controller
        self._on_end, self._on_lost = on_end, on_lost
        self._logs = ShippedLogs(log_directory, on_death=_log.error) if log_directory else None
        self._ended: set[str] = set()
        self._agent: Connection | None = None
        self._pulses: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        """Take the host into the run.

        Raises:
            HostLost: nobody answers there.
            ConfigError: it has another Python or other packages than this host.
        """
        address, silent = await self._reach(), self._silent_seconds
        there = [f"{transport()}://{address}:{self.worker.rpartition(':')[2]}"]
        self.mesh = attach_to_workers(ca="trust_all_connections", workers=there)
        try:
            await bounded(self.mesh.initialized, what=f"attaching {self.label}", seconds=CALL_SECONDS / 2)
            begin = functools.partial(prepare_agent, self._name) if self._spans else None
            self._processes = self.mesh.spawn_procs(per_host={"ranks": 1}, name="agent", bootstrap=begin)
            about = self._name, address, LEASE * silent, self._log_directory, self._controller
            actor = self._processes.spawn(f"agent_{next(_serial)}", HostAgent, *about)
            self._agent = Connection(
                actor.slice(ranks=0), what=f"{{}} of {self.label}", on_push=self._hear, on_lost=self._lose
            )
            await self._agent.call(CALL_SECONDS, HostAgent.echo, b"")
            known: Introduction = await self._agent.call(FACTS_SECONDS + silent, HostAgent.begin)
        except (ActorGone, CallTimeout) as error:
            self._lose(str(error))
            raise HostLost(
                f"{self.label} takes connections and starts nothing. Perhaps a firewall keeps it from reaching this "
                "host; or it is no `titan-rl worker`, or one that was started again (it needs another port) or listens "
                f"at another address; or only one of the hosts has TLS, or their certificates do not fit ({error})"
            ) from error
        try:
            await self._agent.call(CALL_SECONDS / 2, HostAgent.echo, bytes(LARGE_BYTES))
        except CallTimeout as error:
            self._lose(str(error))
            raise HostLost(
                f"{self.label} answers, but {LARGE_BYTES >> 10} KiB at once do not come through: compare the MTU of "
                "the network interfaces on the way"
            ) from error
        self.facts, self.owner, self.scratch = known.facts, known.pid, Path(known.scratch)
        self.python, self.logs = known.python, str(self.scratch / "logs") if self._log_directory else ""
        self._refuse_differences(known)
        self._pulses = asyncio.ensure_future(self._watch())

    def any_ended(self, spawn: str) -> bool:
        return bool(self.lost) or spawn in self._ended

    async def expect_ends(self, spawn: str, kill: bool) -> None:
        await self._ask(HostAgent.expect_ends, spawn, kill)

    async def end(self, spawn: str) -> None:
        await self._ask(HostAgent.end, spawn)

    async def remove_segments(self, channel: str) -> None:
        await self._ask(HostAgent.remove_segments, channel)

    async def require_same(self, tiny: TinyPolicyConfig | None, model_path: Path, imports: tuple[str, ...]) -> None:
        agent = self._agent
        assert agent is not None
        if tiny is not None:
            await agent.call(CALL_SECONDS, HostAgent.make_policy, tiny, str(model_path))
        same = (str(model_path), *imports)
        here = await asyncio.to_thread(lambda: [digest_of(each) for each in same])
        there = await agent.call(CALL_SECONDS, HostAgent.digests, same)
        for what, mine, theirs in zip(same, here, there, strict=True):
            if not theirs:
                raise ConfigError(f"{self.label} has no {what}: put it there, at the same path")
            if theirs != mine:
                raise ConfigError(f"{self.label} has another {what} than this host: copy it there")

    async def require_sees(self, run_directory: Path) -> None:
        assert self._agent is not None
        (there,) = await self._agent.call(CALL_SECONDS, HostAgent.digests, (str(run_directory),))
        if not there:
            raise ConfigError(
                f"{self.label} does not see {run_directory}, where the trainer writes checkpoints: choose a "
                "logging.directory on a file system that all hosts of placement.trainer share"
            )

    async def detach(self) -> None:
        """The worker waits for the next run."""
        if (pulses := self._pulses) is not None:
            pulses.cancel()
            await asyncio.gather(pulses, return_exceptions=True)
        if self._agent is not None and not self.lost:  # it was reached, and somebody there answers
            if pulses is not None:  # it was attached
                await self._ask(HostAgent.pulse, 16 * MOST_BYTES)  # the last lines of the logs
                await self._ask(HostAgent.remove_segments, "")
            self.lost = self.lost or "it was detached"
            await self._agent.close()
            try:
                await bounded(self.mesh.stop(), what=f"detaching {self.label}", seconds=CALL_SECONDS / 2)
            except Exception as error:  # Monarch's own too: the next controller's attachment does not depend on it
                _log.warning("%s", error)
        if self._logs is not None:
            await asyncio.to_thread(self._logs.close, CALL_SECONDS / 2)

    async def _ask(self, endpoint: Any, *args: Any) -> None:
        """A host that is lost has nothing left to be asked for."""
        assert self._agent is not None
        try:
            await self._agent.call(CALL_SECONDS, endpoint, *args)
        except TitanError as error:
            _log.warning("%s", error)

    async def _watch(self) -> None:
        agent = self._agent
        assert agent is not None
        pace = Pace(self._silent_seconds)

        async def pulse() -> list[Pulse]:
            with pace as log_bytes:
                room = self._logs is None or self._logs.has_room
                return [await agent.call(None, HostAgent.pulse, log_bytes if room else 0)]

        try:
            await until_still(pulse, self._silent_seconds)
            self._lose(f"it did not answer for {self._silent_seconds:g} s (placement.host_seconds)")
        except TitanError as error:  # it is gone, or fails
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = f"{self.label} is lost: {reason}"
        if self._agent is not None:
            self._agent.lose(self.lost)
        if self._pulses is not None:  # otherwise `attach` raises
            self._on_lost(self)
            if self._logs is not None:
                self._logs.close(0.0)

    def _hear(self, news: News) -> None:
        match news.kind:
            case "ended":
                self._ended.add(news.of)
                self._on_end(news.of, f"{news.process} on {self._name}", news.code)
            case "broken":  # it fences itself, as one that is cut off
                self._lose(news.process)
            case "log" if self._logs is not None:
                self._logs.put(news)

    async def _reach(self) -> str:
        """Whether somebody listens there; returns the IP address. Raises HostLost with the cause: Monarch would only
        wait."""
        host, _, port = self.worker.rpartition(":")
        try:
            async with asyncio.timeout(REACH_SECONDS):
                _, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
            address = str(writer.get_extra_info("peername")[0])
            writer.close()
            return address
        except ConnectionRefusedError as error:
            trusted = " --trusted-network" * (transport() == "tcp")
            raise HostLost(
                f"nobody listens at {self.label}: start `titan-rl worker --listen {self.worker}{trusted}` there"
            ) from error
        except TimeoutError as error:
            raise HostLost(
                f"{self.label} did not answer within {REACH_SECONDS:g} s: the address is wrong, the host is down, or a "
                "firewall is between"
            ) from error
        except OSError as error:
            raise HostLost(f"{self.label} cannot be reached: {error.strerror or error}") from error

    def _refuse_differences(self, known: Introduction) -> None:
        for what, here in versions().items():
            if (there := known.versions[what]) != here:
                raise ConfigError(
                    f"{self.label} has {what} {there or 'not'} installed, this host {here or 'not'}: install the same "
                    "versions on every host"
                )
        if (apart := abs(known.clock - time.time())) > CLOCK_SECONDS:
            raise ConfigError(f"the clock of {self.label} differs by {apart:.0f} s: set it, as by NTP")
