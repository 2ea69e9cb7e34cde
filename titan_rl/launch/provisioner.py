"""Spawns and stops meshes of processes. The only module that knows where processes come from.

Every mesh has its own environment, set before Python starts, its own rendezvous file and its own log files, new at each
spawn.

The kernel reports the end of a process (`child`); Monarch reports actors that fail in a living process. A fault
goes to the provisioner that spawned the mesh. Once a mesh is being stopped, its faults are dropped: Monarch may notice
the end of a mesh much later, when another mesh, or another run in this process, has taken its place.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import MeshFailure, ProcMesh, this_host

from titan_rl.actors.connection import bounded
from titan_rl.errors import ActorFailed, MeshFailed
from titan_rl.launch.child import ProcessWatch
from titan_rl.launch.placement import TORCHRUN_VARIABLES, MeshPlan
from titan_rl.launch.process import prepare_process, scratch_directory
from titan_rl.processes import OWNER, RENDEZVOUS, ending_in_words

STOP_SECONDS = 20.0
"""Bound on stopping one mesh; past it its processes are killed."""

MONARCH_SECONDS = 2.0
"""How long to wait for Monarch's report if the kernel did not give the exit status. Monarch then looks every second."""

_serial = itertools.count()
"""Makes the name of every mesh and actor mesh of this process unique."""

_spawned: set[str] = set()
"""The names of all actor meshes. A name stays when its mesh is gone: its fault may be late."""

_provisioners: weakref.WeakSet[Provisioner] = weakref.WeakSet()

_ON_EVERY_MESH = {"logger", "setup"}
"""Monarch's own actors. Their faults are ignored: they fail with their process, whose end is reported anyway."""

_log = logging.getLogger(__name__)


class Mesh:
    """The processes of one mesh, and the names of the actors on them."""

    def __init__(self, name: str, processes: ProcMesh, watch: ProcessWatch) -> None:
        self.name = name
        self.watch = watch
        self._processes = processes
        self.actors: list[str] = []
        """The names of the actor meshes spawned here, as Monarch knows them."""

    def spawn(self, name: str, actor: type[Any], *args: Any, **options: Any) -> Any:
        """One actor in every process.

        Args:
            name: for errors and logs.
            actor: its class.
            args, options: for its constructor.

        Returns:
            Monarch's handle on all of them.
        """
        unique = f"{name}_{next(_serial)}"
        _spawned.add(unique)
        self.actors.append(unique)
        return self._processes.spawn(unique, actor, *args, **options)

    async def stop(self, *, kill: bool = False) -> None:
        """End the processes. Never raises: a process that does not stop in time is killed and logged.

        Args:
            kill: do not ask them first, because they hang or because one of them is gone.
        """
        if kill:
            await asyncio.to_thread(self.watch.kill)
        self.watch.expect_ends()
        try:
            await bounded(self._processes.stop(), what=f"stop of mesh {self.name}", seconds=STOP_SECONDS)
        except Exception as error:  # also Monarch's own errors, if the mesh was stopped during its start
            _log.warning("mesh %s: %s", self.name, error)
        finally:
            await asyncio.to_thread(self.watch.end)


class Provisioner:
    """Meshes of processes on this host."""

    def __init__(
        self,
        *,
        log_directory: str,
        imports: tuple[str, ...],
        on_fault: Callable[[ActorFailed], None],
        on_stop: Callable[[str], None] = lambda what: None,
    ) -> None:
        """
        Args:
            log_directory: where each process writes its log.
            imports: the user's modules, imported first in every process.
            on_fault: called once for every process that ends and every actor that fails, from any thread.
            on_stop: called with a sentence when a process was stopped (SIGSTOP) or goes on, from any thread.
        """
        self._log_directory = log_directory
        self._imports = imports
        self._on_fault = on_fault
        self._on_stop = on_stop
        self._meshes: dict[str, Mesh] = {}
        self._words: dict[str, str] = {}  # Monarch's, by mesh
        self._more_words = threading.Condition()
        _provisioners.add(self)
        monarch.actor.unhandled_fault_hook = _hear

    def spawn(self, plan: MeshPlan) -> Mesh:
        """Start the processes of a mesh, with a fresh rendezvous; a mesh of that name must have been stopped."""
        if plan.name in self._meshes:
            raise ValueError(f"mesh {plan.name} is already up")
        self._words.pop(plan.name, None)
        ranks = len(plan.env)
        files = scratch_directory() / f"{plan.name}-{next(_serial)}"
        births = files.with_suffix(".births")

        def command(point: Any) -> Any:
            rank = int(point.rank)
            environment: dict[str, str | None] = {
                **dict.fromkeys(TORCHRUN_VARIABLES),  # None removes a variable
                **plan.env[rank],
                "RANK": str(rank),
                # On CUDA a rank sees only its own device, so that is always number 0.
                "LOCAL_RANK": str(rank) if plan.devices[rank] is None else "0",
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                OWNER: str(os.getpid()),
                RENDEZVOUS: str(files.with_suffix(".rendezvous")),
            }
            arguments = ["-m", "titan_rl.launch.child", str(os.getpid()), str(births), plan.name, str(rank)]
            return BootstrapCommand(sys.executable, None, arguments, environment)

        watch = ProcessWatch(
            plan.name,
            births,
            on_end=functools.partial(self._ended, plan.name),
            on_stop=self._stopped,
        )
        processes = _host().spawn_procs(
            per_host={"ranks": ranks},
            name=plan.name,
            bootstrap=functools.partial(prepare_process, plan.name, self._log_directory, self._imports),
            bootstrap_command=command,
        )
        mesh = self._meshes[plan.name] = Mesh(plan.name, processes, watch)
        return mesh

    async def stop(self, name: str, *, kill: bool = False) -> None:
        """Stop one mesh, if it is up. See `Mesh.stop`."""
        if (mesh := self._meshes.pop(name, None)) is not None:
            await mesh.stop(kill=kill)

    async def stop_all(self) -> None:
        """Stop every mesh. Monarch's actor runtime stays up: it cannot be started twice in one process, and a script
        may start a second system."""
        stopped, self._meshes = self._meshes, {}
        await asyncio.gather(*(mesh.stop() for mesh in stopped.values()))

    def hear(self, actors: str, report: str) -> None:
        """Pass on a fault, unless it is about actors whose mesh was stopped. Called from Monarch's thread.

        Args:
            actors: name of the actor mesh in Monarch. A name that was not spawned here concerns every mesh.
            report: Monarch's report.
        """
        concerned = [m for m in list(self._meshes.values()) if actors in m.actors or actors not in _spawned]
        if not concerned:
            return
        _log.error("fault: %s", report)
        ended = [mesh for mesh in concerned if mesh.watch.any_ended]
        with self._more_words:
            self._words |= {mesh.name: _first_lines(report) for mesh in ended}
            self._more_words.notify_all()
        if not ended:  # otherwise the fault follows from the end, which is reported with its exit status
            name = actors.rpartition("_")[0]
            self._on_fault(MeshFailed(f"mesh {name} failed: {_first_lines(report)}", name))

    def _stopped(self, what: str) -> None:
        """Called from the thread that waits for the process."""
        _log.warning("%s", what)
        self._on_stop(what)

    def _ended(self, mesh: str, process: str, code: int | None) -> None:
        """Called from the thread that waited for the process."""
        concerned = self._meshes.get(mesh)
        if code is not None:
            how = ending_in_words(code)
        else:
            with self._more_words:
                self._more_words.wait_for(lambda: mesh in self._words, MONARCH_SECONDS)
            if self._meshes.get(mesh) is not concerned:
                return  # it was stopped meanwhile, and another one may have its name
            how = f"ended: {self._words.get(mesh, 'nobody saw its exit status')}"
        _log.error("fault: %s %s", process, how)
        self._on_fault(MeshFailed(f"{process} {how}", mesh))


def _host() -> Any:
    """Monarch's handle of this host. If this call starts it, its sockets are put into the scratch directory."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(scratch_directory())
    try:
        return this_host()
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _hear(failure: MeshFailure) -> None:
    """Monarch's hook for the faults of this process's meshes."""
    # Monarch ends this process if the hook raises, so every error in it is only logged.
    try:
        actors = failure.mesh_name.rsplit("-", 1)[0]  # Monarch appended an identifier
        if actors in _ON_EVERY_MESH:
            return
        for provisioner in list(_provisioners):
            provisioner.hear(actors, failure.report())
    except BaseException:
        _log.exception("a fault could not be reported")


def _first_lines(report: str, count: int = 3) -> str:
    return " ".join(line.strip() for line in report.strip().splitlines()[:count])
