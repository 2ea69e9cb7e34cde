"""Where faults of meshes and requests to stop are heard.

The first one ends the work in hand, which `watch` runs, and none is lost: one that arrives before anybody watches is
raised by the next `watch`. What ends a run is announced at once, before anything is saved or closed. After `settle` the
run's result is decided, and what is heard is only logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from titan_rl.errors import MeshFailed, Stopped, TitanError

T = TypeVar("T")

FAULT_GRACE_SECONDS = 1.0
"""How long the work in hand may take to raise its own error after a fault: a call to the dead process is about to raise
too, and says more about what was going on."""

_log = logging.getLogger(__name__)


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
        self._settled = False
        self.hurry = asyncio.Event()
        """Set when somebody asks to stop while the run is ending already."""

    def report(self, fault: TitanError, *, ends: bool = True) -> None:
        """Thread-safe; only the first fault ends the run, the others follow from it. A fault that comes after the
        loop has ended has nobody left to hear it.

        Args:
            ends: False: what is running can do without the mesh; it is only not asked for anything any more.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note, fault, ends)

    def _note(self, fault: TitanError, ends: bool) -> None:
        if isinstance(fault, MeshFailed) and not self._end_of(fault.mesh).done():
            self._end_of(fault.mesh).set_result(fault)
        if not ends:
            return
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
            await _end(task)

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
            await _end(task)

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


async def _end(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
