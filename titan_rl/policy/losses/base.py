"""What a loss is. It sees trained tokens only and returns a SUM over them.

The updater divides that sum by the number of trained tokens of the whole step, over all ranks and micro-batches.
So a gradient does not depend on how the samples were packed, and a loss must not divide by what it happens to see.
All tokens of a sample are in one micro-batch, so a loss may look at whole samples.

No log ratio is exponentiated unbounded: float32 overflows at 88 nats, and where a clip then discards an infinite ratio,
its gradient is 0 times infinity, so a finite loss would have a gradient of NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Nats. A ratio of e^20 = 4.9e8 is beyond every clip and cap that anybody sets, and its square, which a gradient's norm
contains, is far from float32's end. A token beyond it counts as one at it, and no longer pushes where the ratio carries
the gradient."""


def probability_ratio(logprobs: Tensor, before: Tensor) -> Tensor:
    """exp(logprobs - before), never above exp(`LARGEST_LOG_RATIO`); what is not a number stays so."""
    return (logprobs - before).clamp(max=LARGEST_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The N trained tokens of one micro-batch, N >= 1, those of one sample next to each other and in order."""

    logprobs: Tensor  # [N] float32, under the current weights, at the sampling temperature; carries gradient
    entropies: Tensor  # [N] float32, in nats, of the distribution each token was drawn from; carries gradient
    behaviour_logprobs: Tensor  # [N] float32, under the weights that sampled the token
    advantages: Tensor  # [N] float32, the sample's advantage, repeated
    samples: Tensor  # [N] int64, which sample of the micro-batch a token belongs to (for sequence-level losses)
    global_count: int
    """Trained tokens of the whole step, over all ranks and micro-batches: what the sum will be divided by."""

    def select(self, mask: Tensor) -> TrainedTokens:
        """The tokens where `mask` ([N] bool) is True, possibly none; `global_count` stays."""
        return TrainedTokens(
            logprobs=self.logprobs[mask],
            entropies=self.entropies[mask],
            behaviour_logprobs=self.behaviour_logprobs[mask],
            advantages=self.advantages[mask],
            samples=self.samples[mask],
            global_count=self.global_count,
        )


class PolicyLoss(ABC):
    """What a user subclasses. Constructor arguments come from `trainer.loss.kwargs`."""

    metrics: ClassVar[Mapping[str, Literal["mean", "max"]]] = {}
    """Names of the metrics that every call returns. "mean": a sum over tokens, reported per trained token of the step;
    "max": a maximum. Declared because a rank without a trained token reports them too, without calling the loss. How
    far the samples are off-policy is reported whatever the loss (see `step_metrics`)."""

    @abstractmethod
    def __call__(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over `tokens` (a scalar) and the declared metrics (detached scalars)."""
