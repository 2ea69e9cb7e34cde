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
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_rl.actors.connection import bounded
from titan_rl.actors.gateway import GatewayMesh
from titan_rl.actors.generator import GeneratorMesh
from titan_rl.actors.relay import RelayMesh
from titan_rl.actors.rollouts import Rollouts
from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.trainer_client import Trainer
from titan_rl.config import RunConfig
from titan_rl.controller.faults import LOST_WITH, FaultBoard, Restarts, kind_of
from titan_rl.errors import ActorGone, HostLost, MeshFailed, TitanError
from titan_rl.gateway.config import GatewayConfig
from titan_rl.launch.hosts.host import AttachedHost, Host, Needed, listen_for
from titan_rl.launch.mesh_specs import MeshClient, MeshSpec, describe
from titan_rl.launch.placement import Placement, plan
from titan_rl.launch.provisioner import Provisioner
from titan_rl.launch.pulse import until_still
from titan_rl.launch.start import model_directory
from titan_rl.weights.segment_files import remove_segments_of, sweep_dead_segments

CLOSE_SECONDS = 5.0
"""Time limit for a mesh's own `close`, before its processes are stopped. All meshes are closed at once."""

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
        self.config = config
        self.gateway_config = gateway
        self.imports = imports
        self.model_path = model_directory(config)
        """Hugging Face directory that trainer and generators load."""
        self.faults = FaultBoard() if faults is None else faults
        """Told of every process that ends and every actor that fails by itself."""
        self.clients: dict[str, Any] = {}
        """By mesh: the clients of all meshes that were spawned."""
        seconds = config.placement
        self.rollouts = Rollouts(
            workers=config.rollout.workers, start_seconds=seconds.start_seconds, step_seconds=seconds.step_seconds
        )
        """All rollout workers as one object."""
        self.generators: dict[str, GeneratorMesh] = {}
        """Those that are not lost."""
        self.pids: dict[str, list[int]] = {}
        self._on_mesh = on_mesh
        self.say = say
        self.placement: Placement
        self._serving = serving
        self._log_directory = log_directory
        self._provisioner = Provisioner(
            log_directory=str(log_directory) if log_directory is not None else "",
            imports=imports,
            on_fault=self.faults.report,
            on_stop=say,
            address=listen_for(config.placement.hosts),
        )
        self._specs: dict[str, MeshSpec] = {}
        self._restarts: dict[str, Restarts] = {}
        self._left_out: set[str] = set()
        self._begun: set[str] = set()  # meshes whose set-up has begun
        self._up: dict[str, float] = {}  # those that are up, and since when
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
    def relays(self) -> list[RelayMesh]:
        """Those of the hosts that are not lost."""
        known = (self.clients.get(name) for name in self._specs if kind_of(name) == "relay")
        return [relay for relay in known if relay is not None and relay.host in self.hosts]

    def relay_on(self, host: str) -> Any:
        """Handle of a host's relay; None: there is none, because there is one host."""
        return next((relay.actor for relay in self.relays if relay.host == host), None)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Generators that are lost and being replaced."""
        gone = (name for name in self._specs if kind_of(name) == "generator" and name not in self.generators)
        return tuple(name for name in gone if name not in self._left_out)

    # Up and down.

    @property
    def names(self) -> list[str]:
        """See `Placement`."""
        return self.placement.names

    async def place(self) -> None:
        """Attach the hosts of the config, and place the meshes on them.

        Raises:
            HostLost: a host does not answer.
            ConfigError: the hosts cannot hold the placement, or one lacks something.
        """
        where = self.config.placement
        await self._provisioner.attach(*where.hosts, silent_seconds=where.host_seconds, on_lost=self._host_lost)
        self._place()
        trainers = set(self._specs["trainer"].plan.hosts) if "trainer" in self._specs else set()
        for host in self.hosts.values():
            if isinstance(host, AttachedHost):
                runs = self._log_directory.parent if self._log_directory and host.name in trainers else None
                needed = Needed(
                    self.config, self._serving, self.placement.processes, self.model_path, self.imports, runs
                )
                for warning in await host.refuse_unfit(needed):
                    self.say(warning)

    @property
    def hosts(self) -> dict[str, Host]:
        """Those that are not lost, by name."""
        return self._provisioner.hosts

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
            await self._update(name)  # the router, or the gateway, may have been replaced meanwhile

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
        await self._provisioner.stop_all()
        remove_segments_of(os.getpid())

    def _place(self) -> None:
        """Place what has no place yet, or has lost it. Raises ConfigError if there is no room at the start."""
        facts = [host.facts for host in self.hosts.values()]
        before = getattr(self, "placement", None)
        self.placement = plan(self.config, *facts, serving=self._serving, kept=before)
        for name in self._specs.keys() - {*self.placement.names}:
            if kind_of(name) == "relay":  # its host is lost
                del self._specs[name]
        for mesh in self.placement.meshes:
            if mesh.name not in self._specs or self._specs[mesh.name].plan is not mesh:
                self._specs[mesh.name] = describe(mesh, self)
            self._restarts.setdefault(mesh.name, Restarts(self.config.placement.restarts))

    def _host_lost(self, host: Host) -> None:
        self.say(host.lost)

    def _spawn(self, name: str) -> None:
        spec = self._specs[name]
        self._on_mesh(name, "starting processes")
        ranks = self._provisioner.spawn(spec.plan).spawn(name, spec.actor, **spec.arguments())
        actors = ranks if spec.plan.computes else ranks[0]
        if name in self.clients:
            return self.clients[name].replace(actors)
        client = self.clients[name] = spec.client(actors)
        if isinstance(client, GeneratorMesh):
            self.generators[name] = client

    async def _set_up(self, name: str) -> None:
        spec, client = self._specs[name], self.clients[name]
        self._on_mesh(name, spec.doing)
        self._begun.add(name)
        self.pids[name] = await spec.setup(client)
        self._on_mesh(name, "ready")
        self._up[name] = time.monotonic()
        self.faults.ready(name, self.replace)
        self._watching[name] = asyncio.ensure_future(self._watch(name, client))

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
                if (end := self._specs[name].end) is not None:
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
        self._restarts[name].died(time.monotonic() - self._up.pop(name))
        self._on_mesh(name, "lost")
        self.say(f"lost {name}: {fault}; done again: {LOST_WITH[kind_of(name)]}")
        if kind_of(name) == "generator":
            self._work(self.router.generator_lost(name, str(fault)))
        elif kind_of(name) in ("rollout", "gateway"):
            self._work(self.router.client_lost(name))

    async def _replace(self, fault: MeshFailed) -> None:
        name, lost, restarts = fault.mesh, time.monotonic(), self._restarts[fault.mesh]
        self._lose(fault)
        while True:
            self._begun.discard(name)
            await self._provisioner.stop(name, kill=True, remove=getattr(self.clients[name], "channel", ""))
            if restarts.exhausted and self._given_up(fault):
                return
            if restarts.pause:
                self.say(f"{name} starts again in {restarts.pause:g} s: {fault}")
                await asyncio.sleep(restarts.pause)
            self.faults.starts_again(name)
            try:
                self._place()
                if name not in self._specs:  # the relay of a host that is lost
                    return await self._tell_relays()
                if name not in self.names:
                    raise HostLost(f"no host that is left has room for {name}")
                if name == "trainer" and self._log_directory is not None:  # it may have moved
                    for host in set(self._specs[name].plan.hosts):
                        await self.hosts[host].refuse_blind(self._log_directory.parent)
                self._spawn(name)
                await self.faults.unless_lost(name, self._set_up(name))
                break
            except Exception as error:
                _log.warning("%s did not start again", name, exc_info=error)
                fault = MeshFailed(f"{name} did not start again: {error}", name)
                restarts.died(0.0)
        if name not in self._up:
            return  # lost again
        await self._introduce(name)
        self.say(f"{name} is back after {time.monotonic() - lost:.1f} s")

    async def _introduce(self, name: str) -> None:
        """Give handles to those who call the replacement, and to the replacement, because others may have been replaced
        while it was set up."""
        match kind_of(name):
            case "generator":
                generator = self.generators[name] = self.clients[name]
                await self.router.generator_joined(name, generator.rank0)
                if (relay := self.relay_on(self._specs[name].plan.hosts[0])) is not None:
                    await generator.use_relay(relay)
            case "relay":
                await self._tell_relays()
                there = self._specs[name].plan.hosts[0]
                on_it = [mesh for mesh in self.generators if there in self._specs[mesh].plan.hosts]
                await asyncio.gather(*(self.generators[mesh].use_relay(self.relay_on(there)) for mesh in on_it))
            case "router" | "gateway":
                await asyncio.gather(*map(self._update, self._up))
            case "rollout":
                await self._update(name)
                await self.attach_stores()

    async def _tell_relays(self) -> None:
        up = (relay for relay in self.relays if f"relay{relay.host.removeprefix('host')}" in self._up)
        await asyncio.gather(*(relay.use(self.relays) for relay in up))

    async def attach_stores(self) -> None:
        """Let trainer ranks read the samples on other hosts than theirs."""
        if len(self.hosts) > 1:
            where = {worker.store: self._specs[worker.name].plan.hosts[0] for worker in self.rollouts.workers}
            handles = self.rollouts.stores
            await self.trainer.attach_stores({store: (where[store], handles[store]) for store in handles})

    async def _update(self, name: str) -> None:
        """Give a mesh the handles that it calls."""
        with suppress(ActorGone):  # it is being replaced
            if kind_of(name) == "gateway":
                await self.clients[name].use(self.router.actor)
            elif kind_of(name) == "rollout":
                await self.clients[name].use(self.router.actor, self.gateway and self.gateway.actor)

    def _given_up(self, fault: MeshFailed) -> bool:
        """Whether a mesh that fails again and again is not started any more."""
        name, placement = fault.mesh, self.config.placement
        times = f"{name} failed {placement.restarts + 1} time{'s in a row' if placement.restarts else ''}"
        fleet = [mesh for mesh in self._specs if kind_of(mesh) == "generator" and mesh not in self._left_out]
        if name in fleet and len(fleet) > placement.least_generators:
            self._left_out.add(name)
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
