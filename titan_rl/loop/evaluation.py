"""Greedy evaluation on held-out prompts.

Every request asks for exactly the evaluated version. It is one of the wanted versions until the evaluation is over, so
one generator stays at it while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_rl.errors import TaskError
from titan_rl.loop.recording import choose_evaluated
from titan_rl.loop.system import System
from titan_rl.loop.versions import EVALUATED, Publications, ServedVersions
from titan_rl.metrics.activity import Activities
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.scheduling.schedule import Schedule
from titan_rl.types import PolicyVersion


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


class Evaluations:
    """The evaluations of one run, one at a time. Belongs to one event loop."""

    def __init__(
        self,
        system: System,
        schedule: Schedule,
        publications: Publications,
        versions: ServedVersions,
        activity: Activities,
        *,
        record: Callable[[Evaluation], None],
    ) -> None:
        self._system = system
        self._schedule = schedule
        self._publications = publications
        self._versions = versions
        self._activity = activity
        self._record = record

    async def run(self, version: PolicyVersion) -> None:
        """Evaluate a version that `EVALUATED` holds, and let it go."""
        await self._evaluate(version)
        await self._versions.end_evaluation(version)

    async def go_on(self, directory: Path, older: Mapping[PolicyVersion, set[str]]) -> None:
        """Publish the older versions of a checkpoint again, for their holders. Those that were being evaluated are
        evaluated first, from the beginning."""
        for version, holders in older.items():
            await self._publications.publish_again(directory, version, holders)
            if EVALUATED in holders:
                if not self._schedule.is_evaluated(version):
                    await self._versions.serve(version, alone=True)
                    await self._evaluate(version)
                await self._publications.release(version, EVALUATED)

    async def _evaluate(self, version: PolicyVersion) -> None:
        with self._activity("evaluate", version=version):
            evaluation = await evaluate(self._system, version)
        self._record(evaluation)
        self._schedule.evaluated(version)


async def evaluate(system: System, version: PolicyVersion) -> Evaluation:
    """Play the held-out prompts greedily under exactly `version`, which is served until the evaluation is over.

    Raises:
        TaskError: every rollout failed, or there is nothing to play.
    """
    if not system.rollouts.held_out:
        raise TaskError(f"the environment {system.config.environment.name} gave no held-out prompts to evaluate on")
    prompts = range(system.rollouts.held_out)
    groups = [system.held_out_group(prompt, version) for prompt in prompts]
    reports = await system.rollouts.run_groups(groups)
    rollouts = [rollout for report in reports for rollout in report.rollouts]
    errors = [error for report in reports for error in report.errors]
    errors += [error for report in reports for error in report.late]
    graded = [rollout for rollout in rollouts if not rollout.error]
    if not graded:
        raise TaskError(f"all {len(rollouts)} held-out rollouts failed; the first: {errors[0]}")
    described = await system.rollouts.describe(choose_evaluated(version.step, reports), reports)
    matches = [rollout.exact_match for rollout in graded]
    return Evaluation(
        version=version,
        prompts=len(graded),
        exact_match=sum(matches) / len(matches),
        reward=sum(rollout.reward for rollout in graded) / len(graded),
        rollouts=tuple(described),
        failed=len(errors),
        first_error=next(iter(errors), ""),
    )
