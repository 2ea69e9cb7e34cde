"""The hosts of a run: the controller's own, and those that it reaches through an agent.

    attach ─▶ agent ─▶ introduction ─▶ pulses … ─▶ lost: its meshes are lost with it      detach: the worker waits again

- A process is started, watched and killed through the `Host` that it is on, in one way for every host.
- A host that answers no pulse for `placement.host_seconds` is lost, and so is one whose agent has ended. It is reported
  once, and never used again; a worker that is attached again is a new host.
- With one host nothing listens on a network.
"""

import asyncio
import atexit
import functools
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from monarch.actor import attach_to_workers, shutdown_context, this_host
from monarch.rdma import is_ibverbs_available

from titan_rl.config import RunConfig
from titan_rl.errors import ActorGone, CallTimeout, ConfigError, HostLost, TitanError
from titan_rl.hosts.agent import HostAgent, Introduction, News, digest_of, refuse_differences
from titan_rl.hosts.facts import HostFacts, detect_host, transport
from titan_rl.metrics.timeline import Pulse
from titan_rl.policy.models.tiny import make_tiny_policy, model_directory, tiny_policy
from titan_rl.rpc.connection import Connection, bounded
from titan_rl.rpc.mesh_client import until_still
from titan_rl.supervision.fork_server import Stage
from titan_rl.supervision.process import TCP_ONLY, scratch_directory
from titan_rl.supervision.process_watch import ProcessWatch
from titan_rl.weights.segment_files import remove_segments_of

LEAVE_SECONDS = 1.0
"""Bound on the end of Monarch's runtime in the controller, after all meshes were stopped. Monarch has the same one."""
FACTS_SECONDS = 40.0
"""Bound on what an agent finds out of its host: `nvidia-smi` alone may take 30 s."""
REACH_SECONDS = 3.0
"""Bound on the first packet from a host."""
LARGE_BYTES = 64 << 10
"""More than any packet holds."""
CALL_SECONDS = 10.0
"""Bound on any other call to an agent. What a worker answers by itself may take half of it."""
SHIP_SECONDS, SHIP_BYTES = 2.0, 256 << 10
"""Between two looks for what is new in a host's logs, and what is taken at each: at a megabit per second it holds up no
pulse for long."""
LEASE = 3
"""An agent ends when it hears nothing for so many times `placement.host_seconds`: longer than the controller waits for
it, so that a controller which is only slow loses no host. One whose process is gone is not waited for."""
Ended = Callable[[str, str, int | None], None]
"""Told of the end of a process: the spawn, the process, its exit code. See `ProcessWatch`."""

_log = logging.getLogger(__name__)
_serial = itertools.count()


@functools.cache
def _leave_at_exit() -> None:
    """Call when Monarch is up, so that this runs before Monarch's own `atexit` function: that one prints a traceback if
    the runtime does not end in time, as on a busy host, though nothing depends on it any more."""

    @atexit.register
    def leave() -> None:
        try:
            shutdown_context(host_timeout=LEAVE_SECONDS / 3).get(timeout=LEAVE_SECONDS)
        except Exception as error:
            _log.info("Monarch did not end in time: %s: %s", type(error).__name__, error)


class Host:
    """The controller's own machine, host 0. Every other one is an `AttachedHost`, which does the same by calls."""

    name: str
    label: str
    """Its name for people."""
    facts: HostFacts
    owner: int
    """Process that owns the run's files in its shared memory."""
    scratch: Path
    """Directory for files that end with that process."""
    logs: str
    """Directory of log files; empty: processes print to the terminal."""
    python: str
    variables: Mapping[str, str] = {}
    """For every process on it."""
    lost = ""
    """Why it cannot be used any more."""

    def __init__(
        self,
        *,
        stage: Callable[[HostFacts], Stage],
        log_directory: str,
        on_end: Ended,
        on_broken: Callable[[str], None],
        address: str = "",
    ) -> None:
        """`stage`: of the fork server, depending on the host."""
        self.facts = detect_host(address=address)
        self.name = self.label = self.facts.name
        self.owner, self.logs, self.python = os.getpid(), log_directory, sys.executable
        self.scratch = scratch_directory() / f"host-{next(_serial)}"
        self.scratch.mkdir()
        log = f"{log_directory}/fork-server.log" if log_directory else ""
        self._watch = ProcessWatch(self.scratch, stage(self.facts), log, on_end=on_end, on_broken=on_broken)

    def mesh(self) -> Any:
        """Monarch's handle. If this call starts Monarch, its sockets are put into the scratch directory."""
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(scratch_directory())
        try:
            here = this_host()
            _leave_at_exit()
            return here
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before

    async def wake(self, spawn: str) -> None:
        self._watch.wake(spawn)

    async def end(self, spawn: str, *, at_once: bool = False) -> None:
        await asyncio.to_thread(self._watch.end, spawn, at_once)

    async def remove_segments(self, channel: str) -> None:
        """Remove the run's files in its shared memory that belong to a channel; empty: all."""
        remove_segments_of(os.getpid(), channel=channel)

    async def detach(self) -> None:
        """The run does not need the host any more; its meshes are stopped. Never raises."""
        await asyncio.to_thread(self._watch.close)

    async def require_sees(self, run_directory: Path) -> None:
        """Raises ConfigError if the run directory, where the trainer writes checkpoints, is not there."""


class AttachedHost(Host):
    """A host with a worker, which listens at ADDRESS:PORT.

    Args:
        log_directory: of the run, which it names; empty: logs and timelines are not shipped.
        controller: address and port at which the controller listens.
        on_lost: called once, when the host is lost.
    """

    def __init__(
        self,
        name: str,
        worker: str,
        *,
        stage: Callable[[HostFacts], Stage],
        log_directory: str,
        controller: tuple[str, int],
        silent_seconds: float,
        on_end: Ended,
        on_lost: Callable[["AttachedHost"], None],
    ) -> None:
        self.name, self.label, self._worker = name, f"{name} ({worker})", worker
        self._stage, self._log_directory = stage, log_directory
        self._silent_seconds, self._controller = silent_seconds, controller
        self._on_end, self._on_lost = on_end, on_lost
        self._shipped: dict[str, int] = {}  # bytes of its logs and timelines, by file
        self._shipping: asyncio.Task[None] | None = None
        self._detaches = asyncio.Event()
        self._disk = ThreadPoolExecutor(1)  # of its own, for which no event loop waits at its end
        self._agent: Connection | None = None
        self._pulses: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        """Take the host into the run. Raises HostLost: nobody answers there; ConfigError: it has another Python or
        other packages than this host."""
        address, silent = await self._reach(), self._silent_seconds
        there = [f"{transport()}://{address}:{self._worker.rpartition(':')[2]}"]
        self._mesh = attach_to_workers(ca="trust_all_connections", workers=there)
        try:
            await bounded(self._mesh.initialized, what=f"attaching {self.label}", seconds=CALL_SECONDS / 2)
            processes = self._mesh.spawn_procs(per_host={"ranks": 1}, name="agent")
            about = self.name, address, LEASE * silent, self._log_directory, self._controller
            actor = processes.spawn(f"agent_{next(_serial)}", HostAgent, *about)
            self._agent = Connection(
                actor.slice(ranks=0), what=f"{{}} of {self.label}", on_push=self._hear, on_lost=self._lose
            )
            # so packets of all sizes pass
            await self._agent.call(CALL_SECONDS, HostAgent.run, bytes, bytes(LARGE_BYTES))
            known: Introduction = await self._agent.call(FACTS_SECONDS + silent, HostAgent.begin, self._stage)
        except (ActorGone, CallTimeout) as error:
            self._lose(str(error))
            raise HostLost(
                f"{self.label} takes connections and starts nothing. Perhaps a firewall keeps it from reaching this "
                "host, or large packets are lost on the way (compare the MTU of the network interfaces); or it is no "
                "`titan-rl worker`, or one that was started again (it needs another port) or listens at another "
                f"address; or only one of the hosts has TLS, or their certificates do not fit ({error})"
            ) from error
        self.facts, self.owner, self.scratch = known.facts, known.pid, Path(known.scratch)
        self.python, self.logs = known.python, str(self.scratch / "logs") if self._log_directory else ""
        refuse_differences(self.label, known)
        self._pulses = asyncio.ensure_future(self._watch_pulses())
        if self._log_directory:
            self._shipping = asyncio.ensure_future(self._ship_logs())

    async def try_rdma(self, say: Callable[[str], None]) -> None:
        """Read from its memory by RDMA, where both hosts have it: Monarch itself does not go back to TCP. If that
        fails, what is spawned there from now on uses TCP."""
        if not is_ibverbs_available():
            return
        try:
            memory = await self._call(HostAgent.offer_memory)
            reading = memory.read_into(memoryview(bytearray(memory.size())), timeout=int(CALL_SECONDS))
            await bounded(reading, what="the first read", seconds=CALL_SECONDS)
        except Exception as error:  # of Monarch, of its libraries, or of the agent
            self.variables = TCP_ONLY
            why = str(error).partition("\n")[0]
            say(f"RDMA from {self.label} does not work ({why}): its weights go by TCP")

    def mesh(self) -> Any:
        return self._mesh

    async def wake(self, spawn: str) -> None:
        await self._ask(HostAgent.wake, spawn)

    async def end(self, spawn: str, *, at_once: bool = False) -> None:
        await self._ask(HostAgent.end, spawn, at_once)

    async def remove_segments(self, channel: str) -> None:
        await self._ask(HostAgent.run, functools.partial(remove_segments_of, self.owner, channel=channel))

    async def require_same(self, config: RunConfig) -> None:
        """Raises ConfigError unless the policy and the user's modules are there as they are on the controller's host. A
        tiny policy is made there."""
        model_path = model_directory(config)
        if (tiny := tiny_policy(config)) is not None:
            await self._call(HostAgent.run, make_tiny_policy, tiny, model_path.parent)
        for what in (str(model_path), *config.user_modules):
            here, there = await asyncio.to_thread(digest_of, what), await self._call(HostAgent.run, digest_of, what)
            if not there:
                raise ConfigError(f"{self.label} has no {what}: put it there, at the same path")
            if there != here:
                raise ConfigError(f"{self.label} has another {what} than this host: copy it there")

    async def require_sees(self, run_directory: Path) -> None:
        if not await self._call(HostAgent.run, digest_of, str(run_directory)):
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
                if self._shipping is not None:
                    self._detaches.set()
                    await asyncio.wait({self._shipping}, timeout=CALL_SECONDS / 2)
                    self._shipping.cancel()
                await self.remove_segments("")
            self.lost = self.lost or "it was detached"
            await self._agent.close()
            try:
                await bounded(self._mesh.stop(), what=f"detaching {self.label}", seconds=CALL_SECONDS / 2)
            except Exception as error:  # Monarch's own too: the next controller's attachment does not depend on it
                _log.warning("%s", error)

    async def _call(self, endpoint: Any, *args: Any, seconds: float | None = CALL_SECONDS) -> Any:
        assert self._agent is not None
        return await self._agent.call(seconds, endpoint, *args)

    async def _ask(self, endpoint: Any, *args: Any) -> None:
        """A host that is lost has nothing left to be asked for."""
        try:
            await self._call(endpoint, *args)
        except TitanError as error:
            _log.warning("%s", error)

    async def _watch_pulses(self) -> None:
        async def pulse() -> list[Pulse]:
            return [await self._call(HostAgent.pulse, seconds=None)]

        try:
            await until_still(pulse, self._silent_seconds)
            self._lose(f"it did not answer for {self._silent_seconds:g} s (placement.host_seconds)")
        except TitanError as error:  # it is gone, or fails
            self._lose(str(error))

    async def _ship_logs(self) -> None:
        """Append what is new in the host's logs and timelines to those of the run, until it is detached or lost. Beside
        the pulses: a disk that stalls keeps nobody from hearing them."""
        last = False
        with suppress(TitanError):
            while not last:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SHIP_SECONDS):
                        await self._detaches.wait()
                last = self._detaches.is_set()  # it may be set in any of these waits
                most = SHIP_BYTES * (64 if last else 1)
                found = await self._call(HostAgent.new_text, self._shipped, most, seconds=None)
                await asyncio.get_running_loop().run_in_executor(self._disk, self._append, found)

    def _append(self, found: dict[str, bytes]) -> None:
        for name, text in found.items():
            self._shipped[name] = self._shipped.get(name, 0) + len(text)
            with suppress(OSError), open(Path(self._log_directory, name), "ab") as log:
                log.write(text)

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = f"{self.label} is lost: {reason}"
        if self._agent is not None:
            self._agent.lose(self.lost)
        if self._pulses is not None:  # otherwise `attach` raises
            self._on_lost(self)

    def _hear(self, news: News) -> None:
        match news.kind:
            case "ended":
                self._on_end(news.of, f"{news.process} on {self.name}", news.code)
            case "broken":  # it fences itself, as one that is cut off
                self._lose(news.process)

    async def _reach(self) -> str:
        """Whether somebody listens there; returns the IP address. Raises HostLost with the cause: Monarch would only
        wait."""
        host, _, port = self._worker.rpartition(":")
        try:
            async with asyncio.timeout(REACH_SECONDS):
                _, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
            address = str(writer.get_extra_info("peername")[0])
            writer.close()
            return address
        except ConnectionRefusedError as error:
            trusted = " --trusted-network" * (transport() == "tcp")
            raise HostLost(
                f"nobody listens at {self.label}: start `titan-rl worker --listen {self._worker}{trusted}` there"
            ) from error
        except TimeoutError as error:
            raise HostLost(
                f"{self.label} did not answer within {REACH_SECONDS:g} s: the address is wrong, the host is down, or a "
                "firewall is between"
            ) from error
        except OSError as error:
            raise HostLost(f"{self.label} cannot be reached: {error.strerror or error}") from error
