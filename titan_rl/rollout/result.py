"""The result of a group: its finished conversations, and the samples that can be trained.

Both stay in the worker that played the group. Only a `GroupReport` and references leave the worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from titan_rl.rollout.token_graph import TokenGraph
from titan_rl.sandbox.wire import ExamplePrompt
from titan_rl.types import FinishReason, Message, Purpose, StopReason, TrainingSample


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
