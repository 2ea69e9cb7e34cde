"""The meshes of a run or a service: started, watched, replaced and closed from their descriptions.

    placement ─▶ MeshSpec: processes · actor · constructor arguments · client · set-up
                    │ spawn                 │ set_up                    │ close
                    ▼                       ▼                           ▼
                processes, actors ─▶ models, engines, servers ─▶ nothing is left
                    ▲                       │ lost, or hangs
                    └─── killed, pause ◀────┘

`Meshes` belongs to one event loop. `set_up` returns when every part has answered; an error names the part that failed.
A mesh that was up and is lost is spawned again under its name. Its client stays the same object, and makes calls again
that were in flight. `close` never raises. It leaves no process and no shared memory behind, whatever state the parts
are in, and does not wait for a part that has lost a process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titan_rl.actors.connection import bounded
from titan_rl.actors.gateway import GatewayMesh
from titan_rl.actors.generator import GeneratorMesh
from titan_rl.actors.rollouts import Rollouts
from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.trainer_client import Trainer
from titan_rl.config import RunConfig
from titan_rl.controller.faults import LOST_WITH, SETTLED_SECONDS, FaultBoard, Restarts, kind_of
from titan_rl.errors import ActorGone, HostLost, MeshFailed, MeshLeaves, TitanError
from titan_rl.gateway.config import GatewayConfig
from titan_rl.launch.fleet import refuse_unfit, rejoin
from titan_rl.launch.hosts.host import Host, listen_for
from titan_rl.launch.introductions import Introductions
from titan_rl.launch.mesh_specs import MeshClient, MeshSpec, describe
from titan_rl.launch.placement import Placement, plan
from titan_rl.launch.provisioner import Provisioner
from titan_rl.launch.pulse import until_still
from titan_rl.launch.start import model_directory
from titan_rl.weights.segment_files import remove_segments_of, sweep_dead_segments

CLOSE_SECONDS = 5.0
"""Time limit for a mesh's own `close`, before its processes are stopped. All meshes are closed at once."""

TOO_LATE = "Timeout"
"""In Monarch's reason why processes did not start. It hears of no process that takes more than 30 s to be born, however
it is configured, so such a one has to be started again (a test pins that)."""

_log = logging.getLogger(__name__)


class Meshes:
    """The meshes of one placement: their descriptions, and the clients of the running ones."""

    def __init__(
        self,
        config: RunConfig,
        gateway: GatewayConfig,
        *,
        serving: bool = False,
        imports: tuple[str, ...] = (),
        log_directory: Path | None = None,
        faults: FaultBoard | None = None,
        on_mesh: Callable[[str, str], None] = lambda mesh, doing: None,
        say: Callable[[str], None] = lambda what: None,
    ) -> None:
        """
        Args:
            gateway: settings of the gateway, if the placement has one.
            serving: serve a checkpoint, without trainer and rollout workers.
            imports, log_directory, faults, on_mesh, say: see `start.Options`.
        """
        self.config, self.gateway_config = config, gateway
        self.imports = imports
        self.model_path = model_directory(config)
        """Hugging Face directory that trainer and generators load."""
        self.faults = FaultBoard() if faults is None else faults
        """Told of every process that ends, every actor that fails."""
        self.clients: dict[str, Any] = {}
        """By mesh: the clients of all meshes that were spawned."""
        start, step = config.placement.start_seconds, config.placement.step_seconds
        self.rollouts = Rollouts(workers=config.rollout.workers, start_seconds=start, step_seconds=step)
        """All rollout workers as one object."""
        self.generators: dict[str, GeneratorMesh] = {}
        """Those that are not lost."""
        self.pids: dict[str, list[int]] = {}
        self._on_mesh, self.say = on_mesh, say
        self.placement: Placement
        self.fleet = config.generator_names()
        """Names of the generators that there are to be, spares too."""
        self.spares = config.placement.spares
        """How many of these wait for the place of another one."""
        self.leaving: set[str] = set()
        """Hosts on which nothing is placed any more."""
        self.introductions = Introductions(self)
        self.changing = asyncio.Lock()
        """Held by whoever changes the fleet or its hosts."""
        self.workers: dict[str, str] = {}
        """ADDRESS:PORT by name, of all other hosts that are to belong to the run, also of those that are lost."""
        self.serving, self.log_directory = serving, log_directory
        self.provisioner = Provisioner(
            log_directory=str(log_directory) if log_directory is not None else "",
            imports=imports,
            spans=config.logging.spans and not serving,
            on_fault=self.faults.report,
            on_stop=say,
            listens=listen_for(config.placement),
        )
        self.specs: dict[str, MeshSpec] = {}
        """By mesh: how it is started."""
        self.restarts: dict[str, Restarts] = {}
        self.left_out: set[str] = set()
        """Generators that failed too often."""
        self._begun: set[str] = set()  # meshes whose set-up has begun
        self.up: dict[str, float] = {}
        """Meshes that are up, and since when."""
        self.starting: set[str] = set()
        """Meshes that are started while others are up."""
        self._rejoining: set[str] = set()  # lost hosts
        self._changed = asyncio.Event()  # a mesh was stopped or is up
        self._watching: dict[str, asyncio.Future[None]] = {}  # by mesh
        self._working: set[asyncio.Future[None]] = set()

    @property
    def trainer(self) -> Trainer:
        return self.clients["trainer"]

    @property
    def router(self) -> RouterClient:
        return self.clients["router"]

    @property
    def gateway(self) -> GatewayMesh | None:
        return self.clients.get("gateway")

    @property
    def awaited(self) -> tuple[str, ...]:
        """Generators that are being started."""
        return tuple(name for name in self.fleet if name not in self.generators and name not in self.left_out)

    @property
    def names(self) -> list[str]:
        """See `Placement`."""
        return self.placement.names

    # Up and down.

    async def place(self) -> None:
        """Attach the hosts of the config, and place the meshes on them.

        Raises:
            HostLost: a host does not answer.
            ConfigError: the hosts cannot hold the placement, or one lacks something.
        """
        self.workers = {f"host{number}": worker for number, worker in enumerate(self.config.placement.hosts, 1)}
        await self.join(self.workers)
        self.place_again()
        await asyncio.gather(*(refuse_unfit(self, host) for host in self.hosts.values()))

    async def join(self, workers: Mapping[str, str]) -> None:
        """Attach hosts. Nothing is placed on them by this; while meshes are up, they are checked first.

        Args:
            workers: ADDRESS:PORT by the name that each gets, maybe that of a host which was lost.

        Raises:
            HostLost: one does not answer.
            ConfigError: one lacks something.
        """
        silent, check = self.config.placement.host_seconds, partial(refuse_unfit, self) if self.up else None
        await self.provisioner.attach(workers, silent_seconds=silent, on_lost=self._host_lost, check=check)

    @property
    def hosts(self) -> dict[str, Host]:
        """Those that are not lost, by name."""
        return self.provisioner.hosts

    def spawn(self) -> None:
        """Start the processes and actors of all meshes. Does not wait for them."""
        sweep_dead_segments()
        for name in self.names:
            self._spawn(name)

    async def set_up(self, *names: str) -> None:
        """Set these meshes up concurrently. From then on they are replaced when they are lost.

        Raises:
            TitanError: a part did not start.
        """

        async def each(name: str) -> None:
            await self._set_up(name)
            await self.introductions.update(name)  # the router, or the gateway, may have been replaced meanwhile

        if not self.up:
            await self._births()
        await asyncio.gather(*map(each, names))

    async def close(self) -> None:
        """Close everything: first the gateway, which takes calls, then the other meshes, then every process."""
        self.faults.settle()
        ending = [*self._watching.values(), *self._working]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*(self._close(name) for name in self._begun if name == "gateway"))
        await asyncio.gather(*(self._close(name) for name in self._begun if name != "gateway"))
        await self.provisioner.stop_all()
        remove_segments_of(os.getpid())

    def trial(self, fleet: Sequence[str], *, without: str = "") -> Placement:
        """The placement with these generators, without a host. What has no room is not in it. Raises ConfigError if
        that happens at the start."""
        hosts = [host.facts for host in self.hosts.values() if host.name not in {*self.leaving, without}]
        before = getattr(self, "placement", None)
        return plan(self.config, *hosts, serving=self.serving, generators=fleet, kept=before)

    def place_again(self) -> None:
        """Place what has no place yet, or has lost it. See `trial`."""
        self.placement = self.trial(self.fleet)
        for name in self.specs.keys() - {*self.placement.names}:
            if kind_of(name) == "relay" or (kind_of(name) == "generator" and name not in self.fleet):
                del self.specs[name]  # its host is gone, or it was taken out of the fleet
        for mesh in self.placement.meshes:
            if mesh.name not in self.specs or self.specs[mesh.name].plan is not mesh:
                self.specs[mesh.name] = describe(mesh, self)
            self.restarts.setdefault(mesh.name, Restarts(self.config.placement.restarts))

    def _host_lost(self, host: Host) -> None:
        self.say(host.lost)
        if host.name in self.workers and host.name not in self._rejoining:  # else it is awaited already
            self._rejoining.add(host.name)
            self._work(self._rejoin(host.name))

    async def _rejoin(self, host: str) -> None:
        try:
            await rejoin(self, host, self.workers[host])
        finally:
            self._rejoining.discard(host)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the end of a mesh, or its coming up, can bring about."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _spawn(self, name: str) -> None:
        spec = self.specs[name]
        self._on_mesh(name, "starting processes")
        ranks = self.provisioner.spawn(spec.plan).spawn(name, spec.actor, **spec.arguments())
        actors = ranks if spec.plan.computes else ranks[0]
        if name in self.clients:
            return self.clients[name].replace(actors)
        client = self.clients[name] = spec.client(actors)
        if isinstance(client, GeneratorMesh) and "router" not in self.clients:
            self.generators[name] = client

    async def _set_up(self, name: str) -> None:
        spec, client = self.specs[name], self.clients[name]
        self._on_mesh(name, spec.doing)
        self._begun.add(name)
        asked = [mesh for mesh in self.clients if kind_of(mesh) in ("router", "gateway", "relay")]
        reason, *_ = await asyncio.gather(*map(self._born, dict.fromkeys((name, *asked))))
        if reason:
            raise MeshFailed(f"{name}: its processes did not start: {reason}", name)
        self.pids[name] = await spec.setup(client)
        self._on_mesh(name, "ready")
        self.up[name] = time.monotonic()
        self.faults.ready(name, self.replace)
        self._watching[name] = asyncio.ensure_future(self._watch(name, client))
        self._changed.set()

    async def _born(self, name: str) -> str:
        """Wait for the processes of a mesh; returns why they have not started, if they have not. Raises MeshFailed."""
        seconds = self.config.placement.start_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self.provisioner.started(name)
        except TimeoutError:
            what = f"its processes did not start within {seconds:g} s (placement.start_seconds)"
            raise MeshFailed(f"{name}: {what}", name) from None

    async def _births(self) -> None:
        """Wait for the processes of all meshes, of which none is set up yet. Where some are slow, all are started
        again: the actors of some have handles on others."""
        ends = time.monotonic() + self.config.placement.start_seconds
        while late := [
            (name, reason)
            for name, reason in zip(self.names, await asyncio.gather(*map(self._born, self.names)), strict=True)
            if TOO_LATE in reason
        ]:
            slow = f"the processes of {', '.join(name for name, _ in late)} were slow to start"
            if time.monotonic() > ends:
                raise MeshFailed(f"{slow}, again and again for placement.start_seconds: {late[0][1]}", late[0][0])
            self.say(f"{slow}: all are started again")
            await asyncio.gather(*(self.provisioner.stop(name, kill=True) for name in self.names))
            self.spawn()

    async def _close(self, name: str) -> None:
        started = time.monotonic()

        async def ask() -> None:
            await bounded(self.clients[name].close(), what=f"{name}.close", seconds=CLOSE_SECONDS)

        try:
            await self.faults.unless_lost(name, ask())
        except Exception as error:
            _log.warning("closing %s: %s", name, error)
        _log.info("closing %s took %.1f s", name, time.monotonic() - started)

    # Faults and replacements.

    async def _watch(self, name: str, client: MeshClient) -> None:
        """Report a mesh whose actor ends by itself, or that makes no progress. The kernel reports the end of one."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_pulse(name, client))
                if (end := self.specs[name].end) is not None:
                    tasks.create_task(end(client))
        except* ActorGone as group:
            if isinstance(hangs := group.exceptions[0], MeshFailed):
                self.faults.report(hangs)
        except* Exception as group:
            self.faults.report(MeshFailed(str(group.exceptions[0]), name))

    async def _watch_pulse(self, name: str, client: MeshClient) -> None:
        bound = self.config.placement.hang_seconds
        await until_still(client.pulse, bound)
        raise MeshFailed(f"{name} hangs: no progress for {bound:g} s (placement.hang_seconds)", name)

    def replace(self, fault: MeshFailed) -> None:
        """Replace a mesh that was up, and has lost a process, has failed, or hangs."""
        self._work(self._replace(fault))

    def _lose(self, fault: MeshFailed) -> None:
        """Tell everybody that the mesh is lost."""
        name = fault.mesh
        self.clients[name].lose(str(fault))
        self.generators.pop(name, None)
        self._watching.pop(name).cancel()
        up_seconds = time.monotonic() - self.up.pop(name)
        if not isinstance(fault, MeshLeaves):
            played = kind_of(name) == "rollout" and self.clients[name].has_played
            self.restarts[name].died(SETTLED_SECONDS if played else up_seconds)
        self._on_mesh(name, "lost" if name in self.specs else "")
        again = f"; done again: {LOST_WITH[kind_of(name)]}"
        self.say(f"lost {name}: {fault}{again}" if name in self.specs else f"{name} leaves: {fault}")
        if kind_of(name) == "generator":
            self._work(self.router.generator_lost(name, str(fault)))
        elif kind_of(name) in ("rollout", "gateway"):
            self._work(self.router.client_lost(name))

    async def _replace(self, fault: MeshFailed) -> None:
        lost = time.monotonic()
        self._lose(fault)
        if await self.start(fault.mesh, fault):
            self.say(f"{fault.mesh} is back after {time.monotonic() - lost:.1f} s")

    async def start(self, name: str, fault: MeshFailed | None = None) -> bool:
        """Start a mesh while others are up, as often as it takes. Returns whether it is up: it is not if it is given
        up, is not wanted any more, or is lost again.

        Args:
            fault: the mesh was up, and this is why it is not any more.
        """
        self.starting.add(name)
        try:
            up = await self._start(name, fault)
        finally:
            self.starting.discard(name)
        if up:
            await self.introductions.introduce(name)
        return up

    async def _start(self, name: str, fault: MeshFailed | None) -> bool:
        restarts = self.restarts[name]
        while True:
            self._begun.discard(name)
            if name in self.clients:
                await self.provisioner.stop(name, kill=True, remove=getattr(self.clients[name], "channel", ""))
                self._changed.set()
            if await self._gone(name, str(fault)) or (fault and restarts.exhausted and self._given_up(fault)):
                return False
            if restarts.pause:
                self.say(f"{name} starts again in {restarts.pause:g} s: {fault}")
                await asyncio.sleep(restarts.pause)
            self.faults.starts_again(name)
            try:
                if await self._gone(name, str(fault)):
                    return False
                if name not in self.names:
                    raise HostLost(f"no host that is left has room for {name}")
                if name == "trainer" and self.log_directory is not None:  # it may have moved
                    for host in set(self.specs[name].plan.hosts):
                        await self.hosts[host].refuse_blind(self.log_directory.parent)
                self._spawn(name)
                await self.faults.unless_lost(name, self._set_up(name))
                return name in self.up
            except Exception as error:
                _log.warning("%s did not start", name, exc_info=error)
                fault = MeshFailed(f"{name} did not start again: {error}", name)
                restarts.died(0.0)

    async def _gone(self, name: str, reason: str) -> bool:
        """Whether the mesh, for which a place is sought, is not to be there any more."""
        self.place_again()
        if name not in self.specs:
            self._on_mesh(name, "")
            await self.introductions.farewell(name, reason)
        return name not in self.specs  # its host may have come back meanwhile

    def _given_up(self, fault: MeshFailed) -> bool:
        """Whether a mesh that fails again and again is not started any more."""
        name, placement = fault.mesh, self.config.placement
        times = f"{name} failed {placement.restarts + 1} time{'s in a row' if placement.restarts else ''}"
        fleet = {*self.fleet} - self.left_out
        if name in fleet and len(fleet) > placement.least_generators:
            self.left_out.add(name)
            self.say(f"{times} and is left out: {fault}")
            self._work(self.router.generator_left_out(name, str(fault)))
            return True
        if name in fleet and placement.too_few_generators == "wait":
            return False
        least = f"; placement.least_generators is {placement.least_generators}" if name in fleet else ""
        self.faults.given_up(MeshFailed(f"{times}: {fault}{least}", name))
        return True

    def _work(self, work: Coroutine[Any, Any, None]) -> None:
        """Work beside everything else. If it raises, the run ends: nobody else would ever hear of it."""

        async def watched() -> None:
            try:
                await work
            except ActorGone as error:  # the end of a mesh that was given up is reported by itself
                _log.warning("%s", error)
            except Exception as error:
                unknown = TitanError(f"{type(error).__name__}: {error}")
                self.faults.report(error if isinstance(error, TitanError) else unknown)

        task = asyncio.ensure_future(watched())
        self._working.add(task)
        task.add_done_callback(self._working.discard)
