"""What ends a run: the first fatal fault or stop signal decides, and it is announced at once.

- The first fatal fault ends the work that `watch` runs, or the next one, if it came while nobody watched.
- After `settle` the result of the run is decided, and later faults are only logged. A run is done when its steps are
  trained, its last evaluation is over and its weights are saved.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from titan_rl.errors import ActorGone, RollbackNeeded, Stopped, TitanError

T = TypeVar("T")

FAULT_GRACE_SECONDS = 1.0
"""How long the running work may take to raise its own error after a fault. A call to the dead process will raise too,
and its error says more about what was going on."""

_log = logging.getLogger(__name__)


class RunEnd:
    """Collects fatal faults and stop signals for one event loop; both may come at any time and from any thread."""

    def __init__(self, announce: Callable[[Exception], None] = lambda error: None) -> None:
        """`announce` is called as soon as it is known what ends the run: with the fault, and with the work's own error
        if that is a different one."""
        self._loop = asyncio.get_running_loop()
        self._announce = announce
        self._first: asyncio.Future[TitanError] = self._loop.create_future()
        self.is_settled = False
        """Whether the result is fixed."""
        self.beside: set[asyncio.Future[None]] = set()
        """Tasks beside the work that `watch` runs, for whoever closes the run to cancel."""
        self.hurry = asyncio.Event()
        """Set by a stop signal that comes while the run is already ending."""

    def report(self, fault: TitanError) -> None:
        """Report a fault that ends the run. Thread-safe. Only the first one does; later ones follow from it. A fault
        that comes after the event loop has closed is dropped."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.end, fault)

    def end(self, fault: TitanError) -> None:
        """`report` in the event loop's own thread."""
        if not self._first.done() and not self.is_settled:
            self._first.set_result(fault)
            self._announce(fault)
        elif isinstance(fault, Stopped):
            self.hurry.set()
        else:
            _log.warning("after the run's end was decided: %s", fault)

    def work(self, work: Coroutine[Any, Any, None]) -> None:
        """Work beside everything else. If it raises, the run ends: nobody else would ever hear of it."""

        async def watched() -> None:
            try:
                await work
            except ActorGone as error:  # the end of a mesh that was given up is reported by itself
                _log.warning("%s", error)
            except Exception as error:
                unknown = TitanError(f"{type(error).__name__}: {error}")
                self.end(error if isinstance(error, TitanError) else unknown)

        task = asyncio.ensure_future(watched())
        self.beside.add(task)
        task.add_done_callback(self.beside.discard)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`. A fault cancels it and is raised instead. If `work` raises an error of its own too, that error
        wins, because it is closer to the cause."""
        if self._first.done():
            work.close()
            raise self._first.result()
        async with until_either(work, self._first) as task:
            if not task.done() and not isinstance(self._first.result(), Stopped):
                await asyncio.wait({task}, timeout=FAULT_GRACE_SECONDS)
            if not task.done():
                raise self._first.result()
            try:
                return task.result()
            except RollbackNeeded:  # not the end: the run goes on from an earlier step
                raise
            except Exception as error:
                self._announce(error)
                raise

    @contextlib.asynccontextmanager
    async def cancels(self) -> AsyncIterator[None]:
        """As `watch`, for a block of a task: the first fatal fault cancels it and is raised instead."""

        async def fail() -> None:
            await asyncio.wait({self._first})
            raise self._first.result()

        try:
            async with asyncio.TaskGroup() as tasks:
                failing = tasks.create_task(fail())
                yield
                failing.cancel()
        except ExceptionGroup as group:
            error = group.exceptions[0]
            raise error from error.__cause__

    async def unless_given_up(self, mesh: str, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, whatever ends the run meanwhile, unless it is that this mesh was given up. That is raised."""
        async with until_either(work, self._first) as task:
            if not task.done() and getattr(self._first.result(), "mesh", "") != mesh:
                await asyncio.wait({task})
            if not task.done():
                raise self._first.result()
            return task.result()

    def settle(self) -> TitanError | None:
        """Fix the result of the run: from now on faults change nothing. Returns the fault or signal that ended it, if
        any did."""
        self.is_settled = True
        return self._first.result() if self._first.done() else None


class Options(TypedDict, total=False):
    """What the meshes of a run are told from outside, and tell."""

    log_directory: Path | None
    """One log file per process goes here; None, the default: processes print to the terminal."""
    run_end: RunEnd
    """Collects what ends the run. It ends the start, and the next `watch` raises it. Without one, it ends the `with`
    block, and is raised there."""
    on_mesh: Callable[[str, str], None]
    """Called with a mesh's name and what it is doing, during the start and when it is lost; with "" when it is not to
    be there any more."""
    say: Callable[[str], None]
    """Called from any thread with a sentence when a mesh is lost or back."""


@contextlib.asynccontextmanager
async def until_either(
    work: Awaitable[T], end: Awaitable[Any], seconds: float | None = None
) -> AsyncIterator[asyncio.Future[T]]:
    """Begins when `work` or `end` is done, or after these seconds, with the task of `work`. After the block, coroutines
    of both are cancelled; a future is its owner's."""
    task, other = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({task, other}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        yield task
    finally:
        begun = [each for each, given in ((task, work), (other, end)) if each is not given]
        for each in begun:
            each.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


def announcer(say: Callable[[str], None], *, stopping: str) -> Callable[[Exception], None]:
    """Says what ends a run, each text only once. What happens next, `stopping`, follows the name of a stop signal."""

    say_once = functools.cache(say)

    def announce(error: Exception) -> None:
        say_once(f"{error}: {stopping}" if isinstance(error, Stopped) else f"failed: {type(error).__name__}: {error}")

    return announce
