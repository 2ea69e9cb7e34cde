"""The result of a group, and its report to the controller.

- `GroupResult` stays in the worker that played the group: conversations, tokens, samples.
- `GroupReport` holds numbers and references, never tokens: its size does not depend on how much was sampled. Its holder
  owns the `samples` and releases them exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef
from titan_rl.environments.rubric import EXACT_MATCH
from titan_rl.errors import TitanError
from titan_rl.rollout.token_graph import TokenGraph
from titan_rl.sandbox.wire import ExamplePrompt
from titan_rl.types import NO_VERSION, FinishReason, GroupRequest, Message, Purpose, StopReason, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished conversation with its reward."""

    sample: int
    """Position within its group."""
    graph: TokenGraph = field(default_factory=TokenGraph)
    """Every turn that is to be trained."""
    messages: tuple[Message, ...] = ()
    side_conversations: tuple[tuple[Message, ...], ...] = ()
    """See `RolloutRecord`."""
    seeds: tuple[int, ...] = ()
    """Of the requests of the graph's completions."""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function by name."""
    error: str = ""
    """Non-empty when user code failed; such a rollout is reported, never trained."""
    stop_reason: StopReason = StopReason.ERROR
    rendered_anew: int = 0
    """Prompts that continue a sampled turn but had to be rendered again, because they could not be made by extending
    its tokens."""

    @property
    def truncated(self) -> bool:
        """Whether its last turn was cut off."""
        completions = self.graph.completions
        return bool(completions) and completions[-1].finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A finished group: its rollouts and its training samples."""

    group_id: int
    purpose: Purpose
    rollouts: tuple[Rollout, ...]
    samples: tuple[TrainingSample, ...]
    """Empty for evaluation groups; rollouts with an error contribute none."""
    asked: ExamplePrompt | None = None
    """None where the example could not be made."""
    restarts: int = 0
    """Processes of user code that died in the worker since its last result."""


LONGEST_ERROR = 600
"""Characters of a rollout's error that are reported; the worker's log has all of it."""


class RolloutReport(NamedTuple):
    """One rollout in numbers."""

    sample: int
    """Position within its group."""
    reward: float
    reward_parts: dict[str, float]
    """Unweighted value of each reward function by name."""
    error: str
    """Non-empty when user code failed."""
    stop_reason: StopReason
    truncated: bool
    turns: int
    sampled_tokens: int
    metrics: dict[str, float]
    """The engines' metrics of its completions, averaged over its turns."""
    branches: int = 1
    """Samples that its token graph makes; more than 1 if a history was edited, forked or rendered anew."""
    rendered_anew: int = 0
    """Prompts that continue a sampled turn but had to be rendered again, because they could not be made by extending
    its tokens."""

    @property
    def exact_match(self) -> float:
        """By the part of that name. Without one the reward is that of one function, and at least 1 counts."""
        return self.reward_parts.get(EXACT_MATCH, float(self.reward >= 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """A finished group."""

    group_id: int
    purpose: Purpose
    attempt: int
    rollouts: tuple[RolloutReport, ...]
    samples: SampleBatch
    """References; empty for evaluation groups, and when no rollout could be trained."""
    restarts: int = 0
    """Processes of user code that died in the worker since its last report."""

    @property
    def oldest_version(self) -> int | None:
        """Smallest encoded version among the group's trained tokens; None when it has none."""
        versions = [version for version in self.samples.oldest_versions if version != NO_VERSION]
        return min(versions, default=None)

    @property
    def errors(self) -> list[str]:
        """Of the rollouts that failed, but those of `late`."""
        return [each.error for each in self.rollouts if each.error and each.stop_reason is not StopReason.TIMEOUT]

    @property
    def late(self) -> list[str]:
        """Errors of the rollouts that ran out of time, maybe because they waited for others."""
        return [each.error for each in self.rollouts if each.error and each.stop_reason is StopReason.TIMEOUT]

    @property
    def first_error(self) -> str:
        """Empty if no rollout failed."""
        return next(iter(self.errors + self.late), "")

    @property
    def rewards(self) -> set[float]:
        """The different rewards of the rollouts that were graded."""
        return {rollout.reward for rollout in self.rollouts if not rollout.error}

    @property
    def solved(self) -> bool:
        """Whether the group cannot be improved: every rollout is an exact match, with the same reward."""
        return len(self.rewards) == 1 and all(r.exact_match >= 1.0 and not r.error for r in self.rollouts)


def report_of(request: GroupRequest, result: GroupResult, refs: Sequence[SampleRef]) -> GroupReport:
    """The report of a group whose samples were stored."""
    return GroupReport(
        group_id=result.group_id,
        purpose=result.purpose,
        attempt=request.attempt,
        rollouts=tuple(map(_report, result.rollouts)),
        samples=SampleBatch.of(refs),
        restarts=result.restarts,
    )


def unplayed(request: GroupRequest, error: TitanError) -> GroupReport:
    """The report of a group none of whose rollouts could be played."""
    rollouts = tuple(Rollout(sample=sample, error=str(error)) for sample in range(request.samples))
    result = GroupResult(group_id=request.group_id, purpose=request.purpose, rollouts=rollouts, samples=())
    return report_of(request, result, ())


def _report(rollout: Rollout) -> RolloutReport:
    completions = rollout.graph.completions
    return RolloutReport(
        sample=rollout.sample,
        reward=rollout.reward,
        reward_parts=dict(rollout.reward_parts),
        error=rollout.error[:LONGEST_ERROR],
        stop_reason=rollout.stop_reason,
        truncated=rollout.truncated,
        turns=len(completions),
        sampled_tokens=sum(len(completion.token_ids) for completion in completions),
        metrics=_means([completion.metrics for completion in completions]),
        branches=rollout.graph.leaves,
        rendered_anew=rollout.rendered_anew,
    )


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Every metric, averaged over those that have it."""
    if len(metrics) == 1:
        return metrics[0]
    values: dict[str, list[float]] = {}
    for each in metrics:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: sum(its) / len(its) for name, its in values.items()}
