"""How a run ends: whatever ends it, its cause is said at once, then the trainer's weights are saved, then it is closed.

A run is done when its steps are trained, its last evaluation is made and its weights are saved. A process that dies
before that makes it a failure, even if nobody needed that process any more: something is wrong. One that dies later,
while the run is being closed, costs nothing and is only logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from titan_rl.actors.trainer import Trainer
from titan_rl.controller.faults import FaultBoard
from titan_rl.controller.loop import TrainingLoop
from titan_rl.errors import Stopped, TrainingError

SAVE_SECONDS = 120.0
"""Bound on saving the weights of a run that was stopped or has failed, with the step that is under way: enough for a
few GB. Another signal ends it sooner."""

_log = logging.getLogger(__name__)


async def train_and_save(
    loop: TrainingLoop, trainer: Trainer, faults: FaultBoard, checkpoint: Path | None, say: Callable[[str], None]
) -> None:
    """Run the loop to its end and save the trainer's weights, also when it fails or is stopped.

    Args:
        checkpoint: where to; None: they are not wanted.
        say: told where the weights are, or why there are none.

    Raises:
        Stopped: a signal ended the loop.
        TitanError, OSError: what ended it, or kept the weights from being saved.
    """
    failure: Exception | None = None
    unsaved: Exception | None = None
    try:
        await faults.watch(loop.run())
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
        heard = None  # it came while the last weights were being saved, and changed nothing
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
