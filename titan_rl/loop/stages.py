"""What the training loop does besides RL steps: the supervised warm-up before them, evaluations, the filter on groups.

Demonstrations of the warm-up travel by reference, as all samples do. Demonstration number i is used once, in step
i // batch. Every sample is released after its step, or when the warm-up ends early. The demonstrations of the next step
are made while the current step is trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import SamplesLost, TaskError
from titan_rl.importing import import_name
from titan_rl.loop.recording import choose_evaluated
from titan_rl.loop.system import System, group_request
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.rollout.report import GroupReport
from titan_rl.scheduling.group import MAX_ATTEMPTS
from titan_rl.scheduling.schedule import warm_up_is_over
from titan_rl.types import PolicyVersion, Purpose

if TYPE_CHECKING:
    from titan_rl.metrics.activity import Activities
    from titan_rl.view.display import RunDisplay


async def warm_up(system: System, display: RunDisplay, activity: Activities) -> None:
    """Train `trainer.warmup.steps` supervised steps; does nothing if that is 0. Raises TaskError: a demonstration
    cannot be made; SamplesLost: some were lost again and again."""
    config, losses = system.config.trainer.warmup, list[float]()
    if not (steps := config.steps):
        return
    ahead = asyncio.create_task(_demonstrations(system, 0))
    samples: SampleBatch | None = None
    try:
        for step in range(steps):
            with activity("warm_up", step=f"{step + 1} of {steps}"):
                samples = await ahead
                if step + 1 < steps:
                    ahead = asyncio.create_task(_demonstrations(system, step + 1))
                metrics = await _train(system, step, samples)
            losses.append(metrics["loss"])
            said = f"warm-up step {step + 1}/{steps}  loss {losses[-1]:.4f}"
            said += f"  preferred {metrics['preferred']:.0%}" if "preferred" in metrics else ""
            over = warm_up_is_over(losses, enough=config.enough_loss, flat=config.flat_steps)
            if over and step + 1 < steps:
                display.print_line(f"{said}: {over}")
                return
            if step + 1 == steps and losses[-1] > config.enough_loss > 0:
                said += f"; {config.enough_loss:g} was wanted. Do prompts say what their answers need? Else more steps "
                said += "or a larger policy"
            if step + 1 == steps or (step + 1) % max(1, steps // 5) == 0:
                display.print_line(said)
    finally:
        ahead.cancel()  # `RolloutWorkers` releases those that are still being made
        (left,) = await asyncio.gather(ahead, return_exceptions=True)
        if isinstance(left, SampleBatch) and left is not samples:
            await system.rollouts.release(left)


async def _demonstrations(system: System, step: int, attempt: int = 0) -> SampleBatch:
    request = group_request(system.config, Purpose.DEMONSTRATE, step, samples=system.config.trainer.warmup.batch)
    report = await system.rollouts.play(dataclasses.replace(request, attempt=attempt))
    if report.first_error:
        await system.rollouts.release(report.samples)
        raise TaskError(f"no demonstrations: {report.first_error}")
    return report.samples


async def _train(system: System, step: int, samples: SampleBatch) -> dict[str, float]:
    """The metrics of a step on these samples, which are released, or on the same ones made again if some are lost."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return await system.trainer.warm_up_step(samples)
        except SamplesLost:
            if attempt == MAX_ATTEMPTS:
                raise
        finally:
            await system.rollouts.release(samples)
        samples = await _demonstrations(system, step, attempt)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over the held-out prompts whose rollouts were graded."""

    version: PolicyVersion
    prompts: int
    """Those that were graded."""
    exact_match: float
    reward: float
    rollouts: tuple[RolloutRecord, ...] = ()
    """Records of the first that are wrong, and the first that are right."""
    failed: int = 0
    """Prompts without a reward because user code failed. They are left out of all means."""
    first_error: str = ""


async def evaluate(system: System, version: PolicyVersion) -> Evaluation:
    """Play the held-out prompts greedily under exactly `version`. It is wanted until the evaluation is over, so one
    generator stays at it while the others go on. Raises TaskError: every rollout failed, or there is nothing to
    play."""
    if not system.rollouts.held_out:
        raise TaskError(f"the environment {system.config.environment.name} gave no held-out prompts to evaluate on")
    groups = [system.held_out_group(prompt, version) for prompt in range(system.rollouts.held_out)]
    reports = await system.rollouts.run_groups(groups)
    rollouts = [rollout for report in reports for rollout in report.rollouts]
    errors = [report.first_error for report in reports if report.failures]
    if not (graded := [rollout for rollout in rollouts if not rollout.error]):
        raise TaskError(f"all {len(rollouts)} held-out rollouts failed; the first: {errors[0]}")
    described = await system.rollouts.describe(choose_evaluated(version.step, reports), reports)
    matches = [rollout.exact_match for rollout in graded]
    return Evaluation(
        version=version,
        prompts=len(graded),
        exact_match=sum(matches) / len(matches),
        reward=sum(rollout.reward for rollout in graded) / len(graded),
        rollouts=tuple(described),
        failed=len(rollouts) - len(graded),
        first_error=next(iter(errors), ""),
    )


FILTERS = {"no_variance": "titan_rl.loop.stages:no_variance"}
"""Short names of `loop.filter`."""


def make_filter(name: str) -> Callable[[GroupReport], str]:
    """The filter that a config names, which returns why a group is refused; empty: it is trained. Raises ConfigError:
    no filter has that name."""
    if not name:
        return lambda report: ""
    found = import_name(name, FILTERS)

    def guarded(report: GroupReport) -> str:
        try:
            return found(report)
        except Exception as error:
            raise TaskError(f"loop.filter {name} raised {type(error).__name__}: {error}") from error

    return guarded


def no_variance(report: GroupReport) -> str:
    """Refuses groups whose graded rollouts all got the same reward: most advantages are 0 then."""
    return "" if len(report.rewards) > 1 else f"all rewards are {next(iter(report.rewards), 0.0):g}"
