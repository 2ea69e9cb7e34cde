"""Spawns and stops meshes of processes on the hosts of a run.

Every mesh has its own environment, set before Monarch starts, its own rendezvous file and its own log files, new at
each spawn.

The kernel reports the end of a process (`process_watch`); Monarch reports actors that fail in a living process. A fault
goes to the provisioner that spawned the mesh. Once a mesh is being stopped, its faults are dropped: Monarch may notice
the end of a mesh much later, when another mesh, or another run in this process, has taken its place. Monarch's own
actors (loggers, managers of RDMA) are no mesh's: they fail with their process, whose end is reported anyway.
"""

import asyncio
import functools
import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import MeshFailure, ProcMesh, enable_transport

from titan_rl.config import PlacementConfig
from titan_rl.errors import ActorFailed, HostLost, MeshFailed
from titan_rl.gateway.config import listen
from titan_rl.hosts.facts import HostFacts, address_towards, transport
from titan_rl.hosts.host import AttachedHost, Host
from titan_rl.processes import HOST, OWNER, RENDEZVOUS, ending_in_words
from titan_rl.rpc.connection import bounded
from titan_rl.supervision import proxy
from titan_rl.supervision.fork_server import Stage
from titan_rl.supervision.placement import TORCHRUN_VARIABLES, Kind, MeshPlan
from titan_rl.supervision.process import prepare_process, send_while_importing
from titan_rl.supervision.run_end import until_either

STOP_SECONDS = 20.0
"""Bound on stopping one mesh; past it its processes are killed."""

END_SECONDS = 0.5
"""What Monarch says of a mesh waits for so long: if a process has ended, the kernel says how, which is its cause."""

TOO_LATE = "Timeout"
"""In Monarch's reason why processes did not start. It hears of no process that takes more than 30 s to be born, however
it is configured, so such a one has to be started again (a test pins that)."""

_serial = itertools.count()
"""Makes the name of every mesh and actor mesh of this process unique."""

_provisioners: weakref.WeakSet["Provisioner"] = weakref.WeakSet()

_log = logging.getLogger(__name__)


def all_light(host: HostFacts) -> Stage:
    """A fork server whose processes import everything themselves."""
    return Stage(name="light", kinds=tuple(Kind))


def listen_for(where: PlacementConfig) -> tuple[str, int]:
    """Let Monarch listen for other hosts, on `placement.address` or the interface that leads to the first of them.
    Returns this address, empty if there will be none, and a port of it that is open as long as this process lives:
    nobody is let in. Call it before any other call of Monarch's. Raises ConfigError: see `transport`; or the first
    one's name is not known, no network leads there, or the address is none of this host's."""
    if not where.several_hosts:
        return "", 0
    scheme, address = transport(where.untrusted()), where.address or address_towards(where.hosts[0])
    door = listen(address, 0)
    enable_transport(f"{scheme}://{address}:0")
    port = door.getsockname()[1]
    door.detach()  # never closed
    return address, port


class SpawnedProcesses:
    """The processes of one mesh, and the names of the actors on them."""

    def __init__(self, name: str, spawn_id: str, parts: Sequence[tuple[Host, ProcMesh, int]]) -> None:
        """`spawn_id` names this start of the mesh; `parts` are its hosts, and on each its processes and how many."""
        self.name = name
        self.spawn_id = spawn_id
        self._parts = parts
        self.over = asyncio.Event()
        """A host of it is lost, or it is being stopped: Monarch may never say that the rest has started."""
        self.actors: list[str] = []
        """The names of the actor meshes spawned here, as Monarch knows them."""
        self.any_ended = False
        """Whether the end of a process was reported."""

    @property
    def hosts(self) -> list[Host]:
        return [host for host, _, _ in self._parts]

    def spawn(self, name: str, actor: type[Any], *args: Any, **options: Any) -> list[Any]:
        """One actor of this class in every process, made with these arguments; returns the handle of each rank."""
        ranks = []
        for _, processes, count in self._parts:
            unique = f"{name}_{next(_serial)}"
            self.actors.append(unique)
            actors = processes.spawn(unique, actor, *args, **options)
            ranks += [actors.slice(ranks=rank) for rank in range(count)]
        return ranks

    async def started(self) -> str:
        """Returns when the processes have started or failed to, or will not be waited for any more: Monarch's reason if
        they have failed to, else nothing."""

        async def start() -> list[Any]:
            return await asyncio.gather(*(part.initialized for _, part, _ in self._parts), return_exceptions=True)

        async with until_either(start(), self.over.wait()) as starting:
            results = starting.result() if starting.done() else []
        return next((_first_lines(str(each)) for each in results if isinstance(each, Exception)), "")

    async def stop(self, *, kill: bool = False) -> None:
        """End the processes. Never raises: a process that does not stop in time is killed and logged. `kill`: do not
        ask them first, because they hang or because one of them is gone."""
        self.over.set()
        await asyncio.gather(*(self._stop(host, processes, kill) for host, processes, _ in self._parts))

    async def _stop(self, host: Host, processes: ProcMesh, kill: bool) -> None:
        if host.lost:
            return
        try:
            await (host.end(self.spawn_id, at_once=True) if kill else host.wake(self.spawn_id))
            if not host.lost:  # meanwhile; nobody would answer
                await bounded(processes.stop(), what=f"stop of mesh {self.name}", seconds=STOP_SECONDS)
        except Exception as error:  # also Monarch's own errors, if the mesh was stopped during its start
            _log.warning("mesh %s: %s", self.name, error)
        finally:
            await host.end(self.spawn_id)


class Provisioner:
    """Meshes of processes on the hosts of a run."""

    def __init__(
        self,
        *,
        log_directory: str,
        imports: tuple[str, ...],
        spans: bool = False,
        on_fault: Callable[[ActorFailed], None],
        stage: Callable[[HostFacts], Stage] = all_light,
        listens: tuple[str, int] = ("", 0),
    ) -> None:
        """
        Args:
            log_directory: where each process writes its log.
            imports: the user's modules, imported first in every process.
            spans: whether processes write timelines.
            on_fault: called once for every process that ends and every actor that fails, and if the watch over the
                processes of this host is broken; from any thread.
            stage: of a host's fork server; by default it imports nothing before it forks.
            listens: see `listen_for`, if other hosts will be attached.
        """
        self._imports = imports
        self._spans = spans
        self._on_fault = on_fault
        self._meshes: dict[str, SpawnedProcesses] = {}
        self._stopping: list[SpawnedProcesses] = []
        self._log_directory = log_directory
        self._listens, (address, _) = listens, listens
        self._stage = stage
        here = Host(
            stage=stage,
            log_directory=log_directory,
            on_end=self._ended,
            on_broken=lambda what: on_fault(ActorFailed(what)),
            address=address,
        )
        self.hosts: dict[str, Host] = {here.name: here}
        """Those that are not lost, by name."""
        _provisioners.add(self)
        send_while_importing()
        monarch.actor.unhandled_fault_hook = _hear

    async def attach(
        self,
        workers: Mapping[str, str],
        *,
        silent_seconds: float,
        on_lost: Callable[[Host], None] = lambda host: None,
        check: Callable[[AttachedHost], Awaitable[None]] | None = None,
    ) -> list[AttachedHost]:
        """Take hosts into the run: all of them, or none; returns them. Raises HostLost: one does not answer;
        ConfigError: one does not fit to the others.

        Args:
            workers: ADDRESS:PORT of each, by the name that it gets.
            on_lost: told of a host that is lost, before the loss of each of its meshes is reported.
            check: raises if a host that answers is not fit to be taken.
        """

        def lost(host: Host) -> None:
            if self.hosts.get(host.name) is not host:
                return  # it was not taken yet: `attach` raises
            del self.hosts[host.name]
            on_lost(host)
            for mesh in self.on(host):
                mesh.over.set()
                self._on_fault(MeshFailed(host.lost, mesh.name))

        new = [
            AttachedHost(
                name,
                worker,
                stage=self._stage,
                log_directory=self._log_directory,
                controller=self._listens,
                silent_seconds=silent_seconds,
                on_end=self._ended,
                on_lost=lost,
            )
            for name, worker in workers.items()
        ]

        async def take(host: AttachedHost) -> None:
            await host.attach()
            if check is not None:
                await check(host)

        try:
            results = await asyncio.gather(*map(take, new), return_exceptions=True)
            failed = [error for error in results if isinstance(error, BaseException)]
            if failed := [*failed, *(HostLost(host.lost) for host in new if host.lost)]:
                raise failed[0]
        except BaseException:  # a cancellation too
            await asyncio.gather(*(host.detach() for host in new))
            raise
        self.hosts |= {host.name: host for host in new}
        return new

    def on(self, host: Host) -> list[SpawnedProcesses]:
        """The meshes that have processes on a host, those that are being stopped among them."""
        return [mesh for mesh in (*self._meshes.values(), *self._stopping) if host in mesh.hosts]

    async def detach(self, name: str) -> None:
        """Give up a host on which nothing is left."""
        if (host := self.hosts.pop(name, None)) is not None:
            await host.detach()

    def spawn(self, plan: MeshPlan) -> SpawnedProcesses:
        """Start the processes of a mesh, with a fresh rendezvous; a mesh of that name must have been stopped. Raises
        HostLost if a host of it is lost."""
        if plan.name in self._meshes:
            raise ValueError(f"mesh {plan.name} is already up")
        if gone := [host for host in dict.fromkeys(plan.hosts) if host not in self.hosts]:
            raise HostLost(f"{plan.name} was placed on {', '.join(gone)}, which is lost")
        spawn_id = f"{plan.name}-{next(_serial)}"
        parts: list[tuple[Host, ProcMesh, int]] = []
        mesh = self._meshes[plan.name] = SpawnedProcesses(plan.name, spawn_id, parts)
        first = 0
        for name, count in Counter(plan.hosts).items():
            host = self.hosts[name]
            command = functools.partial(_command, plan, spawn_id, host, first, count)
            processes = host.mesh().spawn_procs(
                per_host={"ranks": count},
                name=plan.name,
                bootstrap=functools.partial(prepare_process, plan.name, host.logs, self._imports, self._spans),
                bootstrap_command=command,
            )
            parts.append((host, processes, count))
            first += count
        return mesh

    async def started(self, name: str) -> str:
        """Wait for the start of a mesh, as `SpawnedProcesses.started`. To pickle a handle on the mesh before that
        blocks the event loop until then: hosts would hear nothing of this controller and end what they have of it."""
        return await self._meshes[name].started() if name in self._meshes else ""

    async def stop(self, name: str, *, kill: bool = False, remove: str = "") -> None:
        """Stop one mesh, if it is up, and remove the channel of files that it leaves in shared memory."""
        if (mesh := self._meshes.pop(name, None)) is None:
            return
        self._stopping.append(mesh)
        try:
            await mesh.stop(kill=kill)
            if remove:
                await asyncio.gather(*(host.remove_segments(remove) for host in mesh.hosts if not host.lost))
        finally:
            self._stopping.remove(mesh)

    async def stop_all(self) -> None:
        """Stop every mesh, and detach every host. Monarch's actor runtime stays up: it cannot be started twice in one
        process, and a script may start a second system."""
        stopped, self._meshes = self._meshes, {}
        await asyncio.gather(*(mesh.stop() for mesh in stopped.values()))
        await asyncio.gather(*(host.detach() for host in self.hosts.values()))

    def hear(self, actors: str, report: str) -> None:
        """Pass on a fault, if this actor mesh is of a mesh that is up. Called from a thread of Monarch."""
        mesh = next((mesh for mesh in list(self._meshes.values()) if actors in mesh.actors), None)
        if mesh is None:
            return _log.info("a fault of no mesh that is up: %s", report)
        _log.error("fault: %s", report)

        def tell() -> None:
            if not mesh.any_ended and self._meshes.get(mesh.name) is mesh:
                self._on_fault(MeshFailed(f"mesh {mesh.name} failed: {_first_lines(report)}", mesh.name))

        threading.Timer(END_SECONDS, tell).start()

    def _ended(self, spawn_id: str, process: str, code: int | None) -> None:
        """Called from the thread that waited for the process, or with an agent's news."""
        mesh = next((mesh for mesh in list(self._meshes.values()) if mesh.spawn_id == spawn_id), None)
        if mesh is None:  # it was stopped
            return
        mesh.any_ended = True
        how = "ended, and nobody saw its exit status" if code is None else ending_in_words(code)
        _log.error("fault: %s %s", process, how)
        self._on_fault(MeshFailed(f"{process} {how}", mesh.name))


def _command(plan: MeshPlan, spawn_id: str, host: Host, first: int, count: int, point: Any) -> BootstrapCommand:
    """What a process of the mesh runs: the one at `point` among the `count` on this host, the first of which has rank
    `first`."""
    rank, ranks = first + int(point.rank), plan.ranks
    device, visible = plan.devices[rank], plan.env[rank].get("CUDA_VISIBLE_DEVICES", "")
    environment: dict[str, str | None] = {
        **dict.fromkeys(TORCHRUN_VARIABLES),  # None removes a variable
        **plan.env[rank],
        **host.variables,
        "RANK": str(rank),
        # On CUDA the place of its device among those that it sees.
        "LOCAL_RANK": str(int(point.rank) if device is None else visible.split(",").index(str(device))),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(count),
        OWNER: str(host.owner),
        HOST: host.name,
        RENDEZVOUS: str(host.scratch / f"{spawn_id}.rendezvous") if count == ranks else host.facts.address,
    }
    log = f"{host.logs}/{plan.name}{f'-rank{rank}' * (ranks > 1)}.log" if host.logs else ""
    asks = ["-I", "-S", proxy.__file__, f"{host.scratch}/{plan.kind}.fork"]
    return BootstrapCommand(
        host.python, None, [*asks, str(host.scratch), spawn_id, plan.name, str(rank), log], environment
    )


def _hear(failure: MeshFailure) -> None:
    """Monarch's hook for the faults of this process's meshes."""
    # Monarch ends this process if the hook raises, so every error in it is only logged.
    try:
        actors = failure.mesh_name.rsplit("-", 1)[0]  # Monarch appended an identifier
        for provisioner in list(_provisioners):
            provisioner.hear(actors, failure.report())
    except BaseException:
        _log.exception("a fault could not be reported")


def _first_lines(report: str) -> str:
    return " ".join(line.strip() for line in report.strip().splitlines()[:3])
