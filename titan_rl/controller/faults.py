"""What the death of a part means, and what ends a run: one place collects all faults and stop signals.

    fault of a part that is up ─▶ its replacement (`launch.meshes`)
    any other fault, or signal ─▶ announced ─▶ weights saved ─▶ rollouts stopped, samples released ─▶ meshes closed

- A mesh that was up and is lost is replaced, in a run and in a service; `LOST_WITH` says what that costs. Before it is
  up, the death of any process ends the start. `Restarts` says when a mesh that dies again and again is given up.
- The first fatal fault ends the work that `watch` runs. It is announced at once. No fault is lost: the next `watch`
  raises one that came while nobody watched.
- After `settle` the result of the run is decided, and later faults are only logged. A run is done when its steps are
  trained, its last evaluation is over and its weights are saved.
- The sample stores are empty at the end. A run that ends well must have released everything; if samples are left, it
  fails. A run that fails or is stopped releases the reported samples, as far as the stores still answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import MeshFailed, SamplesLeaked, Stopped, TitanError, TrainerStateLost, TrainingError
from titan_rl.rollout.report import GroupReport

if TYPE_CHECKING:
    from titan_rl.actors.rollouts import Rollouts
    from titan_rl.controller.loop import TrainingLoop

T = TypeVar("T")

FAULT_GRACE_SECONDS = 1.0
"""How long the running work may take to raise its own error after a fault. A call to the dead process will raise too,
and its error says more about what was going on."""

_log = logging.getLogger(__name__)


LOST_WITH = {
    "trainer": "the step in flight",
    "generator": "the tokens that its requests have not streamed",
    "relay": "the weights that it is bringing to its host",
    "router": "pins, and which sessions stick to which generator",
    "gateway": "the rollouts that programs are playing",
    "rollout": "the groups that it plays, and the samples that it holds",
}
"""What has to be done again when a mesh of this kind (`generator1` is a generator) loses a process or hangs. It is lost
as a whole and spawned again under its name. A generator that is given up is left out while
`placement.least_generators` are left; any other mesh that is given up ends the run."""

SETTLED_SECONDS = 30.0
"""A mesh that was up for so long did not fail because of its start."""

LONGEST_PAUSE = 60.0
"""Seconds between two starts of a mesh that fails again and again."""


class Restarts:
    """When one mesh is started again: at once, after failures in a row with doubling pauses, and at last never."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: starts in a row that may fail.
        """
        self._most = most
        self._failures = 0

    def died(self, up_seconds: float) -> None:
        """The mesh is lost after it was up for so long; 0: it did not get up."""
        self._failures = 1 if up_seconds >= SETTLED_SECONDS else self._failures + 1

    @property
    def exhausted(self) -> bool:
        return self._failures > self._most

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start."""
        # without the bound on the exponent, a float overflows after some hours of failures
        return min(LONGEST_PAUSE, 2.0 ** min(self._failures - 2, 6)) if self._failures > 1 else 0.0


def kind_of(mesh: str) -> str:
    """`generator1` → `generator`."""
    return mesh.rstrip("0123456789")


class FaultBoard:
    """Collects faults and stop signals for one event loop; both may come at any time and from any thread."""

    def __init__(self, announce: Callable[[Exception], None] = lambda error: None) -> None:
        """
        Args:
            announce: called as soon as it is known what ends the run: with the fault, and with the work's own error if
                that is a different one.
        """
        self._loop = asyncio.get_running_loop()
        # The thread that reports a fault may be one of Monarch's, in whose context no process can be spawned.
        self._context = contextvars.copy_context()
        self._announce = announce
        self._first: asyncio.Future[TitanError] = self._loop.create_future()
        self._lost: dict[str, asyncio.Future[MeshFailed]] = {}
        self._on_lost: dict[str, Callable[[MeshFailed], None]] = {}
        self._settled = False
        self.hurry = asyncio.Event()
        """Set by a stop signal that comes while the run is already ending."""

    def ready(self, mesh: str, on_lost: Callable[[MeshFailed], None]) -> None:
        """The mesh is up: from now on its loss does not end the run.

        Args:
            on_lost: called once when it is lost, to replace it.
        """
        self._on_lost[mesh] = on_lost
        if (end := self._end_of(mesh)).done():  # in this very moment
            self._loop.call_soon(on_lost, end.result())

    def starts_again(self, mesh: str) -> None:
        """Its old processes are gone and reported; what is reported from now on is about new ones. Until they are
        `ready`, only `unless_lost` hears of it."""
        self._lost.pop(mesh, None)
        self._on_lost[mesh] = _nobody

    def is_replaced_now(self, mesh: str) -> bool:
        """Whether its new processes are being set up."""
        return self._on_lost.get(mesh) is _nobody

    def given_up(self, fault: MeshFailed) -> None:
        """The mesh failed so often that it is not replaced any more: that ends the run."""
        self._on_lost.pop(fault.mesh, None)
        self._end(fault)

    def report(self, fault: TitanError) -> None:
        """Report a fault. Thread-safe. Only the first fatal fault ends the run; later ones follow from it. A fault that
        comes after the event loop has closed is dropped."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note, fault, context=self._context)

    def _note(self, fault: TitanError) -> None:
        if isinstance(fault, MeshFailed):
            end = self._end_of(fault.mesh)
            known = end.done()
            if not known:
                end.set_result(fault)
            if fault.mesh in self._on_lost and not self._settled:
                if not known:
                    self._on_lost[fault.mesh](fault)
                return
        self._end(fault)

    def _end(self, fault: TitanError) -> None:
        if not self._first.done() and not self._settled:
            self._first.set_result(fault)
            self._announce(fault)
        elif isinstance(fault, Stopped):
            self.hurry.set()
        else:
            _log.warning("after the run's end was decided: %s", fault)

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`. A fault cancels it and is raised instead. If `work` raises an error of its own too, that error
        wins, because it is closer to the cause."""
        if self._first.done():
            work.close()
            raise self._first.result()
        async with _until_either(work, self._first) as task:
            if not task.done() and not isinstance(self._first.result(), Stopped):
                await asyncio.wait({task}, timeout=FAULT_GRACE_SECONDS)
            if not task.done():
                raise self._first.result()
            try:
                return task.result()
            except TrainerStateLost:  # not the end: the run goes on from an earlier step
                raise
            except Exception as error:
                self._announce(error)
                raise

    @contextlib.asynccontextmanager
    async def ends(self) -> AsyncIterator[None]:
        """As `watch`, for a block of a task: the first fatal fault cancels it and is raised instead."""
        task, over = asyncio.current_task(), False

        def cancel(first: asyncio.Future[TitanError]) -> None:
            if task is not None and not over:
                task.cancel()

        self._first.add_done_callback(cancel)
        try:
            yield
        except asyncio.CancelledError:
            if task is None or not self._first.done() or task.uncancel():
                raise
            raise self._first.result() from None
        finally:
            over = True

    async def unless_lost(self, mesh: str, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which needs every process of this mesh. If the mesh is lost, raise its fault instead of waiting
        for an answer that cannot come."""
        end = self._end_of(mesh)
        if end.done():
            work.close()
            raise end.result()
        async with _until_either(work, end) as task:
            if not task.done():
                raise end.result()
            return task.result()

    async def unless_fatal(self, mesh: str, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, whatever ends the run meanwhile, unless it is the loss of this mesh. That is raised."""
        async with _until_either(work, self._first) as task:
            if not task.done() and getattr(self._first.result(), "mesh", "") != mesh:
                await asyncio.wait({task})
            if not task.done():
                raise self._first.result()
            return task.result()

    def settle(self) -> TitanError | None:
        """Fix the result of the run: from now on faults change nothing.

        Returns:
            The fault or signal that ended the run; None if there was none.
        """
        self._settled = True
        return self._first.result() if self._first.done() else None

    def _end_of(self, mesh: str) -> asyncio.Future[MeshFailed]:
        return self._lost.setdefault(mesh, self._loop.create_future())


class Announcer:
    """Prints what ends a run, as soon as it is known, and each text only once."""

    def __init__(self, say: Callable[[str], None], *, stopping: str) -> None:
        """
        Args:
            stopping: text after the name of a stop signal: what happens next.
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


def _nobody(fault: MeshFailed) -> None:
    """Is told of what is lost while it starts again: whoever sets it up hears of it by `unless_lost`."""


@contextlib.asynccontextmanager
async def _until_either(work: Coroutine[Any, Any, T], end: asyncio.Future[Any]) -> AsyncIterator[asyncio.Future[T]]:
    """Begins when `work` or `end` is done, with the task of `work`, which is cancelled after the block."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
        yield task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


SAVE_SECONDS = 120.0
"""Time limit for each thing that a stopped or failed run saves, including the step that is under way. Enough for a few
GB. Another signal ends the wait sooner."""

RELEASE_SECONDS = 2.0
"""A failed run waits no longer than this for its stores. Their files are removed with the run in any case."""


Save = Callable[[], Coroutine[Any, Any, str]]
"""Saves something that needs the trainer; returns where it is, in words."""


async def train_and_save(
    loop: TrainingLoop, faults: FaultBoard, saves: Mapping[str, Save], say: Callable[[str], None]
) -> None:
    """Train to the end, and save what there is, even if training fails or is stopped.

    Args:
        saves: by what each saves, as "the weights were".
        say: called with where that is, or why it was not saved.

    Raises:
        TrainerStateLost: nothing was saved, and the run has not ended: another loop has to go on from an earlier step.
        Stopped: a signal ended the loop.
        TitanError, OSError: training or saving failed.
    """
    failure: Exception | None = None
    unsaved: Exception | None = None
    try:
        await faults.watch(loop.run())
    except TrainerStateLost:
        raise
    except Exception as error:
        failure = error
    for what, save in saves.items():
        try:
            if where := await _save(save, faults, seconds=None if failure is None else SAVE_SECONDS):
                say(where)
        except Exception as error:
            _log.error("%s not saved", what, exc_info=error)
            say(f"{what} not saved: {error}")
            unsaved = unsaved or error
    heard = faults.settle()
    if isinstance(heard, Stopped) and unsaved is None:
        heard = None  # the signal came while the last weights were being saved, and changed nothing
    cause = failure or heard or unsaved
    await loop.end(failed=cause is not None)
    if cause is not None:
        raise cause


async def _save(save: Save, faults: FaultBoard, *, seconds: float | None) -> str:
    # a run that has failed or is stopped waits for no replacement
    if seconds is not None and faults.is_replaced_now("trainer"):
        raise TrainingError("the trainer was just being replaced")
    work = faults.unless_fatal("trainer", save()) if seconds is None else faults.unless_lost("trainer", save())
    saving = asyncio.ensure_future(work)
    hurry = asyncio.ensure_future(faults.hurry.wait())
    try:
        await asyncio.wait({saving, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if saving.done():
            return saving.result()
        if hurry.done():
            raise TrainingError("another signal asked not to wait for it")
        raise TrainingError(f"the trainer did not answer within {seconds:g} s")
    finally:
        for task in (saving, hurry):
            task.cancel()
        await asyncio.gather(saving, hurry, return_exceptions=True)


async def check_stores_are_empty(rollouts: Rollouts) -> None:
    """Raises SamplesLeaked unless all stores are empty; the error says what each store holds."""
    if what := await _held(rollouts):
        raise SamplesLeaked(f"the run is over and samples are still held: {what}")


async def release_samples(rollouts: Rollouts, reports: Iterable[GroupReport], *, seconds: float | None) -> None:
    """Stop running rollouts and release reported samples. Never raises a TitanError."""
    try:
        async with asyncio.timeout(seconds):
            await rollouts.stop_groups()
            await rollouts.release(SampleBatch.concat(report.samples for report in reports))
            if what := await _held(rollouts):
                _log.info("still on their way to their release when the run ended: %s", what)
    except (TitanError, TimeoutError) as error:
        _log.warning("the samples of the failed run were not released: %s", error or type(error).__name__)


async def _held(rollouts: Rollouts) -> str:
    return "; ".join(str(report) for report in await rollouts.held() if report.samples)
