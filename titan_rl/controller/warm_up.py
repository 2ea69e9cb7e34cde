"""Supervised warm-up before the first RL step, on demonstrations from the environment.

Demonstrations travel by reference, as all samples do. Demonstration number i is used once, in step i // batch. Every
sample is released after its step, or when the warm-up ends early. The demonstrations of the next step are made while
the current step is trained.
"""

from __future__ import annotations

import asyncio
import logging

from titan_rl.controller.system import System
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.observability.activity import Activities
from titan_rl.observability.progress import RunDisplay
from titan_rl.rollout.report import GroupReport

_log = logging.getLogger(__name__)


async def warm_up(system: System, display: RunDisplay, activity: Activities) -> None:
    """Train `trainer.warmup.steps` supervised steps; does nothing if that is 0.

    Raises:
        TaskError: the environment has no demonstrations, or one cannot be made.
        SamplesLost: demonstrations were lost. They are not made again, because a new run loses only the warm-up.
    """
    steps = system.config.trainer.warmup.steps
    if not steps:
        return
    ahead = _demonstrate(system, 0)
    owned: SampleBatch | None = None  # samples of the current step
    try:
        for step in range(steps):
            with activity("warm_up", step=f"{step + 1} of {steps}"):
                owned = (await ahead).samples
                if step + 1 < steps:
                    ahead = _demonstrate(system, step + 1)
                metrics = await system.trainer.warm_up_step(owned)
                await system.rollouts.release(owned)
                owned = None
            if (step + 1) % max(1, steps // 5) == 0:
                display.say(f"warm-up step {step + 1}/{steps}  loss {metrics['loss']:.4f}")
    except Exception:
        await _give_up(system, owned, ahead)
        raise
    finally:
        ahead.cancel()


def _demonstrate(system: System, step: int) -> asyncio.Task[GroupReport]:
    return asyncio.create_task(system.rollouts.run_group(system.demonstration_group(step)))


async def _give_up(system: System, owned: SampleBatch | None, ahead: asyncio.Task[GroupReport]) -> None:
    """Release demonstrations that will not be trained. `Rollouts` releases those that are still being made."""
    ahead.cancel()
    (outcome,) = await asyncio.gather(ahead, return_exceptions=True)
    left = [] if owned is None else [owned]
    if isinstance(outcome, GroupReport) and outcome.samples is not owned:
        left.append(outcome.samples)
    for error in await asyncio.gather(*map(system.rollouts.release, left), return_exceptions=True):
        if isinstance(error, Exception):  # only logged: the error that ended the warm-up says more
            _log.warning("demonstrations were not released: %s", error)
