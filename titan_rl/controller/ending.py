"""How a run ends: the cause is printed at once, then the trainer's weights are saved, then the run is closed.

A run is done when its steps are trained, its last evaluation is over and its weights are saved. `faults.POLICY` decides
about a process that dies before that. A process that dies later, while the run is being closed, is only logged.

The sample stores are empty at the end, however the run ends. A run that ends well must have released everything; if
samples are left, it fails. A run that fails or is stopped stops its rollouts and releases the reported samples, as far
as the stores still answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from titan_rl.actors.rollouts import Rollouts
from titan_rl.actors.trainer import Trainer
from titan_rl.controller.faults import FaultBoard
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import SamplesLeaked, Stopped, TitanError, TrainingError
from titan_rl.rollout.report import GroupReport

SAVE_SECONDS = 120.0
"""Time limit for saving the weights of a stopped or failed run, including the step that is under way. Enough for a few
GB. Another signal ends the wait sooner."""

LET_GO_SECONDS = 2.0
"""A failed run waits no longer than this for its stores. Their files are removed with the run in any case."""

_log = logging.getLogger(__name__)


async def train_and_save(
    training: Coroutine[Any, Any, object],
    trainer: Trainer,
    faults: FaultBoard,
    checkpoint: Path | None,
    say: Callable[[str], None],
) -> None:
    """Train to the end and save the trainer's weights, even if training fails or is stopped.

    Args:
        training: the loop's run.
        checkpoint: where to save; None: do not save.
        say: called with where the weights are, or why they were not saved.

    Raises:
        Stopped: a signal ended the loop.
        TitanError, OSError: training or saving failed.
    """
    failure: Exception | None = None
    unsaved: Exception | None = None
    try:
        await faults.watch(training)
    except Exception as error:
        failure = error
    if checkpoint is not None:
        try:
            say(await _save(trainer, faults, checkpoint, seconds=None if failure is None else SAVE_SECONDS))
        except Exception as error:
            _log.error("the weights were not saved", exc_info=error)
            say(f"the weights were not saved: {error}")
            unsaved = error
    heard = faults.settle()
    if isinstance(heard, Stopped) and unsaved is None:
        heard = None  # the signal came while the last weights were being saved, and changed nothing
    if (cause := failure or heard or unsaved) is not None:
        raise cause


async def _save(trainer: Trainer, faults: FaultBoard, checkpoint: Path, *, seconds: float | None) -> str:
    saving = asyncio.ensure_future(faults.unless_lost("trainer", trainer.save(checkpoint)))
    hurry = asyncio.ensure_future(faults.hurry.wait())
    try:
        await asyncio.wait({saving, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if saving.done():
            return f"the weights after step {saving.result()} are in {checkpoint}"
        if hurry.done():
            raise TrainingError("another signal asked not to wait for it")
        raise TrainingError(f"the trainer did not answer within {seconds:g} s")
    finally:
        for task in (saving, hurry):
            task.cancel()
        await asyncio.gather(saving, hurry, return_exceptions=True)


async def check_nothing_is_held(rollouts: Rollouts) -> None:
    """Raises SamplesLeaked unless all stores are empty; the error says what each store holds."""
    if what := await _held(rollouts):
        raise SamplesLeaked(f"the run is over and samples are still held: {what}")


async def let_go(rollouts: Rollouts, reports: Iterable[GroupReport]) -> None:
    """Stop running rollouts and release reported samples. Never raises a TitanError."""
    try:
        async with asyncio.timeout(LET_GO_SECONDS):
            await rollouts.stop_groups()
            await rollouts.release(SampleBatch.concat(report.samples for report in reports))
            if what := await _held(rollouts):
                _log.info("still on their way to their release when the run ended: %s", what)
    except (TitanError, TimeoutError) as error:
        _log.warning("the samples of the failed run were not released: %s", error or type(error).__name__)


async def _held(rollouts: Rollouts) -> str:
    return "; ".join(str(report) for report in await rollouts.held() if report.samples)
