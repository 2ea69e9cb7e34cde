"""The meshes of a run or a service: placed, started, watched, replaced and closed.

    placement ─▶ ManagedMesh: one record, one state          MeshKind: arguments, client, peers
                    │ spawn                 │ set up, peers             │ close
                    ▼                       ▼                           ▼
                processes, actors ─▶ models, engines, servers ─▶ nothing is left
                    ▲                       │ lost, or hangs
                    └─── killed, pause ◀────┘

- Before a mesh is up, its loss ends the run. One that was up is spawned again under its name. Its client stays the same
  object, and makes calls again that were in flight.
- A generator that is given up is left out while `placement.least_generators` are left; any other mesh ends the run.
- `close` never raises. It leaves no process and no shared memory behind, whatever state the parts are in, and does not
  wait for a part that has lost a process.
"""

import asyncio
import contextvars
import functools
import logging
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, Unpack

from titan_rl.actors.gateway import GatewayClient
from titan_rl.actors.router_client import RouterClient
from titan_rl.config import RunConfig
from titan_rl.errors import ActorGone, HostLost, MeshFailed, TitanError
from titan_rl.loop.system import System
from titan_rl.policy.models.tiny import model_directory
from titan_rl.rpc.connection import bounded
from titan_rl.rpc.mesh_client import until_still
from titan_rl.supervision.fork_stages import fork_stages
from titan_rl.supervision.managed_mesh import ManagedMesh, MeshState, pause_after
from titan_rl.supervision.mesh_kinds import KINDS, MeshKind, MeshTable
from titan_rl.supervision.placement import Kind
from titan_rl.supervision.provisioner import TOO_LATE, Provisioner, listen_for
from titan_rl.supervision.run_end import Options, RunEnd, until_either
from titan_rl.weights.segment_files import remove_segments_of, sweep_dead_segments

T = TypeVar("T")

LOOK_SECONDS, LOOK_COST = 1.0, 0.05
"""Between two looks at a mesh; with many, so many times their number: a look takes half a millisecond."""

CLOSE_SECONDS = 5.0
"""Time limit for a mesh's own `close`, before its processes are stopped. All meshes are closed at once."""

GONE_SECONDS = 5.0
"""An actor that is gone is reported by the kernel or Monarch within this time, or only the link to it is lost."""

_log = logging.getLogger(__name__)


class Supervisor:
    """All meshes of one run or service. Belongs to one event loop."""

    def __init__(self, config: RunConfig, **options: Unpack[Options]) -> None:
        self.config, self.log_directory = config, options.get("log_directory")
        self.run_end = options.get("run_end") or RunEnd()
        self.say = options.get("say", lambda what: None)
        self._on_mesh = options.get("on_mesh", lambda mesh, doing: None)
        self.provisioner = Provisioner(
            log_directory=str(self.log_directory or ""),
            imports=config.user_modules,
            spans=config.logging.spans and not config.serving,
            on_fault=self.report,
            stage=functools.partial(fork_stages, config),
            listens=listen_for(config.placement),
        )
        self.table = MeshTable(config=config, report=self.report, say=self.say, hosts=self.provisioner.hosts)
        self.meshes = self.table.meshes
        self.kinds: dict[Kind, MeshKind] = {kind: make(self.table) for kind, make in KINDS.items()}
        self._changed = asyncio.Event()  # a mesh has another state, was born, or its processes are gone
        self._watching: dict[ManagedMesh, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        # The thread that reports a fault may be one of Monarch's, in whose context no process can be spawned.
        self._context = contextvars.copy_context()

    @property
    def router(self) -> RouterClient:
        return self.meshes["router"].client

    @property
    def gateway(self) -> GatewayClient:
        return self.meshes["gateway"].client

    def system(self) -> System:
        """The parts of a run as the training loop sees them."""
        return System(
            config=self.config,
            model_path=self.table.model_path,
            trainer=self.meshes["trainer"].client,
            router=self.router,
            rollouts=self.table.rollouts,
            generators=self.table.generators,
            gateway=self.gateway if "gateway" in self.meshes else None,
        )

    def start_over(self, config: RunConfig) -> None:
        """The next loop has these settings, and a trainer that is made with them. The other meshes stay as they are."""
        self.config = self.table.config = config
        self.table.trainer_path = model_directory(config)
        self.meshes["trainer"].client.outdate()

    # Up and down.

    def place_again(self) -> None:
        """Place what has no place yet, or has lost it. Raises ConfigError if that is not possible at the start."""
        for new in self.table.place():
            client = self.kinds[new.kind].client(new)
            self.meshes[new.name] = ManagedMesh(new, client=client)

    def spawn(self) -> None:
        """Start the processes and actors of all meshes. Does not wait for them."""
        sweep_dead_segments()
        for mesh in self.table.placed:
            mesh.begin()
            self._spawn(mesh)

    async def set_up(self, *names: str) -> None:
        """Set these meshes up concurrently. From then on they are replaced when they are lost. Raises TitanError: a
        part did not start."""
        meshes = [self.meshes[name] for name in names]
        starts = [asyncio.ensure_future(self._set_up(mesh)) for mesh in meshes]
        self.run_end.beside.update(starts)  # where one fails, `close` ends the others
        await asyncio.gather(*starts)
        self.run_end.beside.difference_update(starts)
        await self._introduce(*meshes)

    async def close(self) -> None:
        """Close everything: first the gateway, which takes calls, then the other meshes, then every process."""
        self.run_end.settle()
        ending = [*self._watching.values(), *self.run_end.beside]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        living = [mesh for mesh in self.meshes.values() if mesh.is_up or mesh.state is MeshState.BORN]
        await asyncio.gather(*(self._close(mesh) for mesh in living if mesh.kind is Kind.GATEWAY))
        await asyncio.gather(*(self._close(mesh) for mesh in living if mesh.kind is not Kind.GATEWAY))
        await self.provisioner.stop_all()
        remove_segments_of(os.getpid())

    async def _close(self, mesh: ManagedMesh) -> None:
        started = time.monotonic()
        try:
            closing = bounded(mesh.client.close(), what=f"{mesh.name}.close", seconds=CLOSE_SECONDS)
            await self._unless_lost(mesh, closing)
        except Exception as error:
            _log.warning("closing %s: %s", mesh.name, error)
        _log.info("closing %s took %.1f s", mesh.name, time.monotonic() - started)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what a change of some mesh can bring about."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # Starts.

    def _spawn(self, mesh: ManagedMesh) -> None:
        self._on_mesh(mesh.name, "starting processes")
        processes, arguments = self.provisioner.spawn(mesh.plan), self.kinds[mesh.kind].arguments(mesh)
        mesh.client.replace(processes.spawn(mesh.name, mesh.client.actor_class, **arguments))

    async def _set_up(self, mesh: ManagedMesh) -> None:
        kind = self.kinds[mesh.kind]
        self._on_mesh(mesh.name, kind.doing)
        await self._birth(mesh)
        await self.until(
            lambda: MeshState.STARTING not in {each.state for each in self.meshes.values() if each.kind in kind.calls}
        )
        pids = await mesh.client.setup(**kind.peers(mesh))
        self._require_starting(mesh)
        mesh.ready(pids, time.monotonic())
        self._on_mesh(mesh.name, "ready")
        self._watching[mesh] = asyncio.ensure_future(self._watch(mesh))
        self._changed.set()

    @staticmethod
    def _require_starting(mesh: ManagedMesh) -> None:
        """Raises MeshFailed if the mesh was lost while something of its start was waited for."""
        if not mesh.is_starting:
            raise mesh.fault or MeshFailed(f"{mesh.name} was lost", mesh.name)

    async def _birth(self, mesh: ManagedMesh) -> None:
        """Wait for the processes of a mesh. Those that are slow in the first start are started again. Raises
        MeshFailed."""
        seconds = self.config.placement.start_seconds
        try:
            async with asyncio.timeout(seconds):
                while TOO_LATE in (reason := await self.provisioner.started(mesh.name)) and mesh.ends_start:
                    self.say(f"the processes of {mesh.name} were slow to start: they are started again")
                    await self.provisioner.stop(mesh.name, kill=True)
                    self._spawn(mesh)
        except TimeoutError:
            reason = f"not within {seconds:g} s (placement.start_seconds)"
        if reason:
            raise MeshFailed(f"{mesh.name}: its processes did not start: {reason}", mesh.name)
        self._require_starting(mesh)
        mesh.bear()
        self._changed.set()

    async def _introduce(self, *meshes: ManagedMesh) -> None:
        """Let others know of meshes that came up, and give every mesh the handles of those that it calls: some may have
        been replaced while it was set up."""
        await asyncio.gather(*(self.kinds[mesh.kind].announce(mesh) for mesh in meshes if mesh.is_up))
        up = [mesh for mesh in self.meshes.values() if mesh.is_up]
        await asyncio.gather(*(mesh.client.set_peers(**self.kinds[mesh.kind].peers(mesh)) for mesh in up))

    # Faults and replacements.

    def report(self, fault: TitanError) -> None:
        """Report a fault of a mesh, or one that ends the run. Thread-safe."""
        with suppress(RuntimeError):  # the loop is closed: nothing follows any more
            self._loop.call_soon_threadsafe(self._note, fault, context=self._context)

    def _note(self, fault: TitanError) -> None:
        mesh = self.meshes.get(fault.mesh) if isinstance(fault, MeshFailed) else None
        if mesh is None or not isinstance(fault, MeshFailed):
            return self.run_end.end(fault)
        was_up = mesh.is_up
        if not mesh.lose(fault, time.monotonic(), has_worked=mesh.client.has_worked):
            return
        self._changed.set()
        if mesh.ends_start or self.run_end.is_settled:
            self.run_end.end(fault)
        elif was_up:
            self.run_end.work(self._replace(mesh, fault))
        # else a start of it is under way, which fails with this fault and is tried again there

    async def unless_lost(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which needs every process of this mesh. Raises MeshFailed if the mesh is not up, or is lost
        meanwhile."""
        mesh = self.meshes[name]
        if not mesh.is_up:
            work.close()
            raise mesh.fault or MeshFailed(f"{name} is not up", name)
        return await self._unless_lost(mesh, work)

    async def _unless_lost(self, mesh: ManagedMesh, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`. If the mesh is lost, raise its fault instead of waiting for an answer that cannot come."""
        losses = mesh.losses
        async with until_either(work, self.until(lambda: mesh.losses > losses)) as task:
            if not task.done():
                assert mesh.fault is not None
                raise mesh.fault
            return task.result()

    async def _watch(self, mesh: ManagedMesh) -> None:
        """Report a mesh whose actor ends by itself, or that makes no progress, or to which the link is lost: calls to
        it wait for a replacement. The kernel reports the end of a process, and says more about it."""
        watch = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_pulse(mesh))
                tasks.create_task(mesh.client.watch())
        except* Exception as group:
            fault = group.exceptions[0]
            if isinstance(fault, ActorGone) and not isinstance(fault, MeshFailed):
                with suppress(TimeoutError):
                    async with asyncio.timeout(GONE_SECONDS):
                        await self.until(lambda: self._watching.get(mesh) is not watch)
            if self._watching.get(mesh) is watch:  # else the mesh is being replaced, or was
                self.report(fault if isinstance(fault, MeshFailed) else MeshFailed(str(fault), mesh.name))

    async def _watch_pulse(self, mesh: ManagedMesh) -> None:
        bound = self.config.placement.hang_seconds
        await until_still(mesh.client.pulse, bound, every=max(LOOK_SECONDS, LOOK_COST * len(self.meshes)))
        still = f"{mesh.name} hangs: no progress for {bound:g} s (placement.hang_seconds)"
        raise MeshFailed(still, mesh.name, still=bound)

    async def _replace(self, mesh: ManagedMesh, fault: MeshFailed) -> None:
        """Replace a mesh that was up."""
        lost, kind = time.monotonic(), self.kinds[mesh.kind]
        mesh.client.lose(str(fault))
        self._watching.pop(mesh).cancel()
        self._on_mesh(mesh.name, "lost" if mesh.wanted else "")
        again = f"lost {mesh.name}: {fault}; done again: {kind.lost_with}"
        self.say(again if mesh.wanted else f"{mesh.name} leaves: {fault}")
        self.run_end.work(kind.announce_loss(mesh, str(fault)))
        if await self.start(mesh):
            self.say(f"{mesh.name} is back after {time.monotonic() - lost:.1f} s")

    async def start(self, mesh: ManagedMesh) -> bool:
        """Start a mesh while others are up, as often as it takes. Returns whether it is up: it is not if it is given
        up, is not wanted any more, or is lost again."""
        while True:
            await self.provisioner.stop(mesh.name, kill=True, remove=mesh.client.files_left)
            self._changed.set()
            if await self._is_gone(mesh):
                return False
            if mesh.state is MeshState.LOST:
                if mesh.failures > self.config.placement.restarts and self._may_give_up(mesh):
                    return False
                if pause := pause_after(mesh.failures):
                    self.say(f"{mesh.name} starts again in {pause:g} s: {mesh.fault}")
                    await asyncio.sleep(pause)
                    if await self._is_gone(mesh):
                        return False
            mesh.begin()
            try:
                await self._unless_lost(mesh, self._start(mesh))
                break
            except Exception as error:
                fault = MeshFailed(f"{mesh.name} did not start again: {error}", mesh.name)
                _log.warning("%s", fault, exc_info=error)
                mesh.client.lose(str(fault))  # its set-up may have been answered
                mesh.lose(fault, time.monotonic())
        await self._introduce(mesh)
        return mesh.is_up

    async def _start(self, mesh: ManagedMesh) -> None:
        if mesh not in self.table.placed:
            raise HostLost(f"no host that is left has room for {mesh.name}")
        if mesh.kind is Kind.TRAINER and self.log_directory is not None:  # it may have moved
            for host in set(mesh.plan.hosts):
                await self.provisioner.hosts[host].require_sees(self.log_directory.parent)
        self._spawn(mesh)
        await self._set_up(mesh)

    async def start_missing(self) -> None:
        """Place what has no place yet, and start what has one, but neither is up nor starts, also a generator that was
        given up. One call at a time."""
        self.place_again()
        missing = [mesh for mesh in self.table.placed if mesh.is_idle]
        for mesh in missing:
            mesh.revive()
        await asyncio.gather(*map(self.start, missing))

    async def _is_gone(self, mesh: ManagedMesh) -> bool:
        """Whether the mesh, for which a place is sought, is not to be there any more."""
        self.place_again()
        if mesh.wanted:
            return False
        if self.meshes.get(mesh.name) is mesh:
            del self.meshes[mesh.name]
        self._changed.set()
        self._on_mesh(mesh.name, "")
        await self.kinds[mesh.kind].announce_end(mesh, str(mesh.fault))
        await self._introduce()
        return True

    def _may_give_up(self, mesh: ManagedMesh) -> bool:
        """Give a mesh up that fails again and again, unless the run waits for its generators."""
        where = self.config.placement
        times = f"{mesh.name} failed {where.restarts + 1} time{'s in a row' if where.restarts else ''}"
        generator, least = mesh.kind is Kind.GENERATOR, where.least_generators
        may_go = generator and len({*self.table.fleet} - self.table.left_out()) > least
        if generator and not may_go and where.too_few_generators == "wait":
            return False
        mesh.give_up()
        if may_go:
            self.say(f"{times} and is left out: {mesh.fault}")
            self.run_end.work(self.kinds[mesh.kind].announce_end(mesh, str(mesh.fault)))
        else:
            why = f"; placement.least_generators is {least}" if generator else ""
            self.run_end.end(MeshFailed(f"{times}: {mesh.fault}{why}", mesh.name))
        return True
