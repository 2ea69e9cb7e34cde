"""Whose business the end of a process is, and where every fault and every request to stop is heard.

`POLICY` is the whole policy, for a run and for a service alike. It holds from the moment a mesh is ready; before that
any end of a process ends the start. The first fault that ends a run ends the work in hand, which `watch` runs, and is
announced at once, before anything is saved or closed. None is lost: one that comes before anybody watches is raised by
the next `watch`. After `settle` the result is decided, and what is heard is only logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal, NamedTuple, TypeVar

from titan_rl.errors import MeshFailed, Stopped, TitanError

T = TypeVar("T")

FAULT_GRACE_SECONDS = 1.0
"""How long the work in hand may take to raise its own error after a fault: a call to the dead process is about to raise
too, and says more about what was going on."""

_log = logging.getLogger(__name__)


class Consequence(NamedTuple):
    """What follows when a mesh loses a process. Calls that are open fail in any case."""

    told: Literal["nobody", "the router"]
    ends: Literal["at once", "with the last of its kind"]


POLICY: dict[str, Consequence] = {
    "trainer": Consequence(told="nobody", ends="at once"),
    "generator": Consequence(told="the router", ends="with the last of its kind"),
    "router": Consequence(told="nobody", ends="at once"),
    "rollout": Consequence(told="nobody", ends="at once"),
    "gateway": Consequence(told="nobody", ends="at once"),
}
"""By kind of mesh (`generator1` is a generator). A mesh is lost as a whole: a generator that loses one of its
tensor-parallel ranks is like one that loses its only rank."""


def kind_of(mesh: str) -> str:
    """`generator1` → `generator`."""
    return mesh.rstrip("0123456789")


class FaultBoard:
    """Collects faults from any thread and signals from any moment, for one event loop."""

    def __init__(self, announce: Callable[[Exception], None] = lambda error: None) -> None:
        """
        Args:
            announce: told what ends the run, as soon as it is known: a fault, and the error of the work where it is
                another one.
        """
        self._loop = asyncio.get_running_loop()
        self._announce = announce
        self._first: asyncio.Future[TitanError] = self._loop.create_future()
        self._lost: dict[str, asyncio.Future[MeshFailed]] = {}
        self._spares: dict[str, Callable[[MeshFailed], None]] = {}
        self._settled = False
        self.hurry = asyncio.Event()
        """Set when somebody asks to stop while the run is ending already."""

    def ready(self, mesh: str, tell: Callable[[MeshFailed], None]) -> None:
        """From now on the mesh's end is judged by `POLICY`.

        Args:
            tell: passes the end on to whom the policy names.
        """
        self._lost.pop(mesh, None)  # its former life
        if POLICY[kind_of(mesh)].ends == "with the last of its kind":
            self._spares[mesh] = tell

    def report(self, fault: TitanError) -> None:
        """Thread-safe; only the first fault ends the run, the others follow from it. A fault that comes after the
        loop has ended has nobody left to hear it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note, fault)

    def _note(self, fault: TitanError) -> None:
        if isinstance(fault, MeshFailed):
            end = self._end_of(fault.mesh)
            known = end.done()
            if not known:
                end.set_result(fault)
            if fault.mesh in self._spares and not self._settled:
                if not known:
                    self._spare_is_lost(fault)
                return
        self._end(fault)

    def _spare_is_lost(self, fault: MeshFailed) -> None:
        self._spares[fault.mesh](fault)
        mates = [mesh for mesh in self._spares if kind_of(mesh) == kind_of(fault.mesh)]
        if not all(self._end_of(mesh).done() for mesh in mates):
            _log.warning("the run goes on without %s: %s", fault.mesh, fault)
            return
        reasons = "; ".join(dict.fromkeys(str(self._end_of(mesh).result()) for mesh in mates))
        self._end(MeshFailed(reasons, fault.mesh))

    def _end(self, fault: TitanError) -> None:
        if not self._first.done() and not self._settled:
            self._first.set_result(fault)
            self._announce(fault)
        elif isinstance(fault, Stopped):
            self.hurry.set()
        else:
            _log.warning("after the run's end was decided: %s", fault)

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; a fault cancels it and is raised in its place. Work's own error wins if both are there: it is
        closer to the cause."""
        if self._first.done():
            work.close()
            raise self._first.result()
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._first}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not isinstance(self._first.result(), Stopped):
                await asyncio.wait({task}, timeout=FAULT_GRACE_SECONDS)
            if not task.done():
                raise self._first.result()
            try:
                return task.result()
            except Exception as error:
                self._announce(error)
                raise
        finally:
            await _cancelled(task)

    async def unless_lost(self, mesh: str, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which needs every process of this mesh: raises the mesh's fault instead of waiting for an answer
        that cannot come."""
        end = self._end_of(mesh)
        if end.done():
            work.close()
            raise end.result()
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, end}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise end.result()
            return task.result()
        finally:
            await _cancelled(task)

    def settle(self) -> TitanError | None:
        """The run has its result, or is about to fail: from now on faults change nothing.

        Returns:
            What was heard until now.
        """
        self._settled = True
        return self._first.result() if self._first.done() else None

    def _end_of(self, mesh: str) -> asyncio.Future[MeshFailed]:
        return self._lost.setdefault(mesh, self._loop.create_future())


class Announcer:
    """Says what ends a run: once, as soon as it is known."""

    def __init__(self, say: Callable[[str], None], *, stopping: str) -> None:
        """
        Args:
            stopping: what follows when somebody asked to stop.
        """
        self._say = say
        self._stopping = stopping
        self._said: set[str] = set()

    def __call__(self, error: Exception) -> None:
        if isinstance(error, Stopped):
            text = f"{error}: {self._stopping}"
        else:
            text = f"failed: {type(error).__name__}: {error}"
        if text not in self._said:
            self._said.add(text)
            self._say(text)


async def _cancelled(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
