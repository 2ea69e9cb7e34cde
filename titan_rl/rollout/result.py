"""What becomes of a group: its finished conversations, and the samples that can be trained.

Both stay in the worker that played them; what leaves it is a `GroupReport` and references.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from titan_rl.environments.rubric import Score
from titan_rl.rollout.token_graph import TokenGraph
from titan_rl.sandbox.wire import Asked
from titan_rl.types import Completion, FinishReason, Message, Purpose, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished conversation with its reward."""

    sample: int
    """Position within its group."""
    graph: TokenGraph = field(default_factory=TokenGraph)
    """Every turn that is to be trained."""
    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function by name."""
    error: str = ""
    """Non-empty when user code failed; such a rollout is reported, never trained."""
    rendered_anew: int = 0
    """Prompts that go on from what was sampled and yet could not be made by extending it."""

    @property
    def truncated(self) -> bool:
        """Whether its last turn was cut off."""
        completions = self.graph.completions
        return bool(completions) and completions[-1].finish_reason is FinishReason.LENGTH


@dataclass(slots=True, kw_only=True)
class Played:
    """What has been played of a rollout so far; becomes a `Rollout` when it ends, however it ends."""

    messages: list[Message]
    graph: TokenGraph = field(default_factory=TokenGraph)
    finish_reasons: list[FinishReason] = field(default_factory=list)
    """One per turn of the policy."""
    rendered_anew: int = 0

    def add(self, prompt_token_ids: np.ndarray, completion: Completion, finish_reason: FinishReason) -> None:
        """A turn of the policy; see `TokenGraph.add`."""
        self.graph.add(prompt_token_ids, completion)
        self.finish_reasons.append(finish_reason)

    def scored(self, sample: int, score: Score) -> Rollout:
        """Over, and graded."""
        return replace(self.failed(sample, ""), reward=score.reward, reward_parts=score.parts)

    def failed(self, sample: int, error: str) -> Rollout:
        """Cut off by a failure of user code."""
        return Rollout(
            sample=sample,
            graph=self.graph,
            messages=tuple(self.messages),
            error=error,
            rendered_anew=self.rendered_anew,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A finished group: its rollouts and what of them can be trained."""

    group_id: int
    purpose: Purpose
    rollouts: tuple[Rollout, ...]
    samples: tuple[TrainingSample, ...]
    """Empty for evaluation groups; rollouts with an error contribute none."""
    asked: Asked | None = None
    """None where the example could not be made."""
    restarts: int = 0
    """Processes of user code that died in the worker since its last result."""
