"""Losses with PPO's clip: against the weights that sampled, and against the weights before the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from titan_rl.errors import ConfigError
from titan_rl.policy.losses.base import TrainedTokens, probability_ratio
from titan_rl.policy.losses.bundled import BundledLoss

if TYPE_CHECKING:
    from torch import Tensor


class GRPOLoss(BundledLoss):
    """Clipped policy gradient with the group's advantages, and an entropy bonus.

    Per token, with r = exp(logprob - behaviour logprob) and advantage A:

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - entropy_bonus * entropy

    PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with the advantages of GRPO (Shao et al.
    2024, "DeepSeekMath", arXiv:2402.03300, eq. 3), without its KL term (see `trainer.kl`), and with every token
    weighted alike instead of every sample (DAPO, arXiv:2503.14476, eq. 8). r is taken against the weights that SAMPLED
    the token, however old; with asynchronous training this bounds how far an old sample can push.
    """

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        entropy_bonus: float = 0.0,
        sequence_low: float = 0.0,
        sequence_high: float = math.inf,
    ) -> None:
        """
        Args:
            clip_low: tokens with negative advantage stop pushing once r < 1 - clip_low.
            clip_high: tokens with positive advantage stop pushing once r > 1 + clip_high.
            entropy_bonus: weight of the entropy; 0 lets the policy collapse to one answer sooner.
            sequence_low, sequence_high: samples whose mean ratio is outside are dropped; the defaults drop none.
        """
        super().__init__(entropy_bonus=entropy_bonus, sequence_low=sequence_low, sequence_high=sequence_high)
        self.clip_low, self.clip_high = _checked_clip(clip_low, clip_high)

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        ratio = probability_ratio(tokens.logprobs, tokens.behaviour_logprobs)
        return _clipped_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high)


class DecoupledPPOLoss(BundledLoss):
    """PPO with a clip around the trainer's own weights before the step, the age of a sample corrected by a weight.

    Per token, with w = exp(proximal - behaviour logprob), u = exp(logprob - proximal logprob) and advantage A:

        -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)   where w <= weight_cap, else 0

    The decoupled objective of Hilton et al. (2022, "Batch size-invariance for policy optimization", arXiv:2110.00641,
    sec. 3) as AReaL uses it (Fu et al. 2025, arXiv:2505.24298, eq. 5): the proximal logprobs are the trainer's,
    recomputed over the whole batch when the step begins, and tokens above the cap are dropped, not cut to it, as in
    AReaL's implementation (`behav_imp_weight_cap`).

    With ONE optimizer step per batch, which is what this trainer does, the proximal policy is the current policy: u is
    1, the clip never acts, and the gradient is exactly w A grad logprob: the plain importance-weighted policy gradient
    without its heaviest tokens. It is unbiased below the cap, whereas "grpo" stops an old sample that already went its
    way; for the same reason it does not bound how far old samples push, which is what "grpo" is the default for.
    """

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        weight_cap: float = 5.0,
        entropy_bonus: float = 0.0,
        sequence_low: float = 0.0,
        sequence_high: float = math.inf,
    ) -> None:
        """
        Args:
            clip_low, clip_high: of u, as for "grpo".
            weight_cap: tokens whose w is above it are dropped; `inf` drops none and lets the variance grow with the
                age of the samples.
            entropy_bonus: weight of the entropy.
            sequence_low, sequence_high: samples whose mean ratio is outside are dropped; the defaults drop none.
        """
        super().__init__(entropy_bonus=entropy_bonus, sequence_low=sequence_low, sequence_high=sequence_high)
        self.clip_low, self.clip_high = _checked_clip(clip_low, clip_high)
        if not weight_cap > 1:
            raise ConfigError(f"trainer.loss.kwargs.weight_cap must be above 1, got {weight_cap}")
        self.weight_cap = weight_cap

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        weight = probability_ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs)
        dropped = weight > self.weight_cap
        ratio = probability_ratio(tokens.logprobs, tokens.proximal_logprobs)
        gains, clipped = _clipped_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high)
        return weight.masked_fill(dropped, 0.0) * gains, clipped | dropped


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    free = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return free.minimum(clipped), clipped < free


def _checked_clip(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low < 1:
        raise ConfigError(f"trainer.loss.kwargs.clip_low must be in [0, 1), got {low}")
    if high < 0:
        raise ConfigError(f"trainer.loss.kwargs.clip_high must be >= 0, got {high}")
    return low, high
