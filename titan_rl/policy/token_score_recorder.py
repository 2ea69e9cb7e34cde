"""What a step computes about every token of a few samples, for whoever records them.

- The logprob is the trainer's, at the weights before the step: the sample's first optimizer step.
- The weight of a token is minus the derivative of the step's loss by that logprob, at the same weights: near them the
  loss changes by -weight per nat. So it holds advantage, importance ratio, clip, masks and KL term, divided as
  the step's loss is. Positive: the step makes the token more likely; 0: the token pushes nothing. For
  `reinforce` it is advantage / trained tokens. An entropy bonus is not in it, because it is about all tokens that
  might have been sampled.

The backward pass computes the derivatives in any case; here they are only read, so no bit of the weights changes.

Importing this module does not load torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titan_rl.types import TrainingSample

if TYPE_CHECKING:
    from torch import Tensor

SampleName = tuple[int, int]
"""(group_id, sample)."""


class TokenScores(NamedTuple):
    """Of the N trained tokens of one sample, in order."""

    logprobs: np.ndarray  # [N] float32
    weights: np.ndarray  # [N] float32


class TokenScoreRecorder:
    """Collects the scores of the samples with these names."""

    def __init__(self, names: Iterable[SampleName] = ()) -> None:
        self.names = frozenset(names)
        self.scores: dict[SampleName, TokenScores] = {}
        """By sample; complete after the last backward pass."""

    def watch(self, samples: Sequence[TrainingSample], logprobs: Tensor, before: Tensor) -> None:
        """Call before the backward pass through a micro-batch of these samples; `logprobs` [N] are those of their
        trained tokens, and carry gradient; `before` [N] are those at the weights before the batch."""
        if not self.names:
            return
        ends = itertools.accumulate((int(np.count_nonzero(sample.loss_mask)) for sample in samples), initial=0)
        spans = {
            name: slice(*span)
            for sample, span in zip(samples, itertools.pairwise(ends), strict=True)
            if (name := (sample.group_id, sample.sample)) in self.names
        }

        def weigh(weights: Tensor) -> None:
            for name, span in spans.items():
                self.scores[name] = TokenScores(values[span], weights[span].cpu().numpy())

        if spans:
            values = before.cpu().numpy()
            weigh(logprobs.new_zeros(len(logprobs)))  # a loss may do without them
            logprobs.register_hook(lambda derivatives: weigh(-derivatives))
