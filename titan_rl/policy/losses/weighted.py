"""Losses whose gradient is a weight times A grad logprob; the weight itself carries no gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from titan_rl.errors import ConfigError
from titan_rl.policy.losses.base import TrainedTokens, probability_ratio
from titan_rl.policy.losses.bundled import BundledLoss

if TYPE_CHECKING:
    from torch import Tensor


class PolicyGradientLoss(BundledLoss):
    """The plain policy gradient: every sample counts as if the current weights had drawn it.

    Per token -A logprob - entropy_bonus * entropy: REINFORCE (Williams 1992, "Simple statistical gradient-following
    algorithms for connectionist reinforcement learning", eq. 4) with the group's advantages. Right on-policy; with old
    samples its gradient is biased, and the longer the lag the more. It is here to be compared with.
    """

    def __init__(
        self, *, entropy_bonus: float = 0.0, sequence_low: float = 0.0, sequence_high: float = math.inf
    ) -> None:
        """
        Args:
            entropy_bonus: weight of the entropy.
            sequence_low, sequence_high: samples whose mean ratio is outside are dropped; the defaults drop none.
        """
        super().__init__(entropy_bonus=entropy_bonus, sequence_low=sequence_low, sequence_high=sequence_high)

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        gains = tokens.advantages * tokens.logprobs
        return gains, gains.new_zeros(len(gains)).bool()


class TruncatedImportanceLoss(BundledLoss):
    """Truncated importance sampling: the ratio corrects for a sample's age, up to a cap.

    Per token -min(r, cap) A logprob - entropy_bonus * entropy, with r = exp(logprob - behaviour logprob) taken as a
    constant. The truncated weights of IMPALA's policy gradient (Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and
    sec. 4.2), per token; what Yao et al. (2025, "Your efficient RL framework secretly brings you off-policy RL
    training") apply between engine and trainer. The cap bounds the variance and biases towards the behaviour policy;
    a token that has become rarer weighs less, but no token ever stops pushing.
    """

    def __init__(
        self,
        *,
        cap: float = 2.0,
        entropy_bonus: float = 0.0,
        sequence_low: float = 0.0,
        sequence_high: float = math.inf,
    ) -> None:
        """
        Args:
            cap: largest weight of a token, at least 1.
            entropy_bonus: weight of the entropy.
            sequence_low, sequence_high: samples whose mean ratio is outside are dropped; the defaults drop none.
        """
        super().__init__(entropy_bonus=entropy_bonus, sequence_low=sequence_low, sequence_high=sequence_high)
        if not cap >= 1:
            raise ConfigError(f"trainer.loss.kwargs.cap must be at least 1, got {cap}")
        self.cap = cap

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        ratio = probability_ratio(tokens.logprobs.detach(), tokens.behaviour_logprobs)
        return ratio.clamp(max=self.cap) * tokens.advantages * tokens.logprobs, ratio > self.cap
