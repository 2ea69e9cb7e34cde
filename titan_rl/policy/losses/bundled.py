"""The losses that come with titan_rl. They share an entropy bonus, and a mask over samples that are too far off-policy.

A masked sample adds nothing to loss and gradient, whatever its tokens hold, but counts in the step's number of trained
tokens: the others do not weigh more for it. NaN is never masked, so it still ends the step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING

from titan_rl.errors import ConfigError
from titan_rl.policy.losses.base import PolicyLoss, TrainedTokens, probability_ratio

if TYPE_CHECKING:
    from torch import Tensor


class BundledLoss(PolicyLoss):
    """Minus a surrogate, minus the entropy bonus, over the samples inside the band.

    The band is on the geometric mean of a sample's token ratios, its sequence-level ratio

        s = exp(1/|y| sum over its trained tokens of (logprob - behaviour logprob))

    which is GSPO's (Zheng et al. 2025, arXiv:2507.18071, eq. 7). GSPO clips with it; here a sample whose s is below
    `sequence_low` or above `sequence_high` is dropped as a whole (as sequence-level masks do that reject what trainer
    and engine disagree about). A sample is off by its mean, so one odd token of a long answer does not drop it.

    Args:
        entropy_bonus: weight of the entropy; 0 lets the policy collapse to one answer sooner.
        sequence_low, sequence_high: the band; the defaults drop no sample.
    """

    metrics = {"clip_share": "mean", "masked_share": "mean"}

    def __init__(
        self, *, entropy_bonus: float = 0.0, sequence_low: float = 0.0, sequence_high: float = math.inf
    ) -> None:
        if not 0 <= sequence_low < sequence_high:
            raise ConfigError(
                f"trainer.loss.kwargs: need 0 <= sequence_low < sequence_high, got {sequence_low} and {sequence_high}"
            )
        self.entropy_bonus = entropy_bonus
        self.sequence_low = sequence_low
        self.sequence_high = sequence_high

    @abstractmethod
    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        """The objective to maximise [N], N >= 0, and where the loss removed or bounded a gradient [N] bool."""

    def __call__(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        masked = tokens.samples.new_zeros(())
        if self.sequence_low > 0 or self.sequence_high < math.inf:
            kept = self._inside_band(tokens)
            masked = (~kept).sum()
            tokens = tokens.select(kept)
        gains, clipped = self.surrogate(tokens)
        loss = -gains.sum()
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * tokens.entropies.sum()
        return loss, {"clip_share": clipped.sum(), "masked_share": masked}

    def _inside_band(self, tokens: TrainedTokens) -> Tensor:
        """[N] bool, the same for all tokens of a sample."""
        log_ratio = (tokens.logprobs - tokens.behaviour_logprobs).detach()
        empty = log_ratio.new_zeros(int(tokens.samples[-1]) + 1)
        sums = empty.index_add(0, tokens.samples, log_ratio)
        counts = empty.index_add(0, tokens.samples, log_ratio.new_ones(len(log_ratio)))
        ratio = (sums / counts.clamp(min=1)).exp()
        outside = (ratio < self.sequence_low) | (ratio > self.sequence_high)
        return ~outside[tokens.samples]


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
            entropy_bonus, sequence_low, sequence_high: see `BundledLoss`.
        """
        super().__init__(entropy_bonus=entropy_bonus, sequence_low=sequence_low, sequence_high=sequence_high)
        if not 0 <= clip_low < 1:
            raise ConfigError(f"trainer.loss.kwargs.clip_low must be in [0, 1), got {clip_low}")
        if clip_high < 0:
            raise ConfigError(f"trainer.loss.kwargs.clip_high must be >= 0, got {clip_high}")
        self.clip_low = clip_low
        self.clip_high = clip_high

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        ratio = probability_ratio(tokens.logprobs, tokens.behaviour_logprobs)
        free = ratio * tokens.advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens.advantages
        return free.minimum(clipped), clipped < free


class PolicyGradientLoss(BundledLoss):
    """The plain policy gradient: every sample counts as if the current weights had drawn it.

    Per token -A logprob - entropy_bonus * entropy: REINFORCE (Williams 1992, "Simple statistical gradient-following
    algorithms for connectionist reinforcement learning", eq. 4) with the group's advantages. Right on-policy; with old
    samples its gradient is biased, and the longer the lag the more. It is here to be compared with.
    """

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
            entropy_bonus, sequence_low, sequence_high: see `BundledLoss`.
        """
        super().__init__(entropy_bonus=entropy_bonus, sequence_low=sequence_low, sequence_high=sequence_high)
        if not cap >= 1:
            raise ConfigError(f"trainer.loss.kwargs.cap must be at least 1, got {cap}")
        self.cap = cap

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        ratio = probability_ratio(tokens.logprobs.detach(), tokens.behaviour_logprobs)
        return ratio.clamp(max=self.cap) * tokens.advantages * tokens.logprobs, ratio > self.cap


class DecoupledPPOLoss(BundledLoss):
    """AReaL's decoupled PPO at one optimizer step per batch: importance sampling without the heaviest tokens.

    Per token -r A logprob where r <= weight_cap, else 0, with r = exp(logprob - behaviour logprob) taken as a constant.

    The decoupled objective (Hilton et al. 2022, arXiv:2110.00641, sec. 3; Fu et al. 2025, arXiv:2505.24298, eq. 5)
    clips around the trainer's weights before the batch's first step and weighs tokens by their ratio to the behaviour
    policy. This trainer makes ONE step per batch, so the clip could never act and there are no arguments for it.
    Tokens above the cap are dropped, not cut to it, as in AReaL's implementation (`behav_imp_weight_cap`). Unbiased
    below the cap, but it does not bound how far old samples push; "grpo" does, and is the default for that.
    """

    def __init__(
        self,
        *,
        weight_cap: float = 5.0,
        entropy_bonus: float = 0.0,
        sequence_low: float = 0.0,
        sequence_high: float = math.inf,
    ) -> None:
        """
        Args:
            weight_cap: tokens whose r is above it are dropped; `inf` drops none and lets the variance grow with the
                age of the samples.
            entropy_bonus, sequence_low, sequence_high: see `BundledLoss`.
        """
        super().__init__(entropy_bonus=entropy_bonus, sequence_low=sequence_low, sequence_high=sequence_high)
        if not weight_cap > 1:
            raise ConfigError(f"trainer.loss.kwargs.weight_cap must be above 1, got {weight_cap}")
        self.weight_cap = weight_cap

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        ratio = probability_ratio(tokens.logprobs.detach(), tokens.behaviour_logprobs)
        dropped = ratio > self.weight_cap
        return ratio.masked_fill(dropped, 0.0) * tokens.advantages * tokens.logprobs, dropped
