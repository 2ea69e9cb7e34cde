"""Greedy evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan_rl.controller.system import System
from titan_rl.errors import TaskError
from titan_rl.rollout.report import RolloutReport
from titan_rl.types import PolicyVersion

TRANSCRIPTS = 3
"""Rollouts that an evaluation shows."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over the held-out prompts whose rollouts were graded."""

    version: PolicyVersion
    prompts: int
    """Those that were graded."""
    exact_match: float
    reward: float
    transcripts: tuple[str, ...] = ()
    """One line each of a few rollouts: the first that are wrong, and the first that are right."""
    failed: int = 0
    """Prompts without a reward because user code failed. They are left out of all means."""
    first_error: str = ""


async def evaluate(system: System, version: PolicyVersion, *, pinned_to: str | None = None) -> Evaluation:
    """Play the held-out prompts greedily under `version`.

    Args:
        version: served until the evaluation is over, by every generator or, if set, by `pinned_to`.
        pinned_to: a generator that is leased for this evaluation.

    Raises:
        TaskError: every rollout failed, or there is nothing to play.
    """
    if not system.rollouts.held_out:
        raise TaskError(f"the environment {system.config.environment.name} gave no held-out prompts to evaluate on")
    groups = [system.held_out_group(prompt, version, pinned_to=pinned_to) for prompt in range(system.rollouts.held_out)]
    reports = await system.rollouts.run_groups(groups)
    rollouts = [rollout for report in reports for rollout in report.rollouts]
    errors = [rollout.error for rollout in rollouts if rollout.error]
    graded = [rollout for rollout in rollouts if not rollout.error]
    if not graded:
        raise TaskError(f"all {len(rollouts)} held-out rollouts failed; the first: {errors[0]}")
    exact = [rollout.exact_match for rollout in graded]
    return Evaluation(
        version=version,
        prompts=len(graded),
        exact_match=sum(exact) / len(exact),
        reward=sum(rollout.reward for rollout in graded) / len(graded),
        transcripts=_transcripts(graded),
        failed=len(errors),
        first_error=next(iter(errors), ""),
    )


def _transcripts(rollouts: Sequence[RolloutReport]) -> tuple[str, ...]:
    lines: dict[bool, list[str]] = {False: [], True: []}
    for rollout in rollouts:
        right = rollout.exact_match >= 1
        if (shown := rollout.shown) is not None:
            cut = " (cut off)" if rollout.truncated else ""
            wanted = f", wanted '{shown.wanted}'" if shown.wanted and not right else ""
            said = f"'{shown.prompt}' → '{shown.answer}'{cut}{wanted}, reward {rollout.reward:.3f}"
            lines[right].append(f"{'right' if right else 'wrong'}  {said}")
    wrong = lines[False][:2]
    return (*wrong, *lines[True][: TRANSCRIPTS - len(wrong)])
