"""Policy losses, and their corrections for samples that older weights drew (a table of them is in `README.md`).

A loss sees trained tokens only and returns a SUM over them. The updater divides that sum by the number of trained
tokens of the whole step, over all ranks and micro-batches. So a gradient does not depend on how the samples were
packed, and a loss must not divide by the number of tokens it sees. All tokens of a sample are in one micro-batch, so a
loss may look at whole samples.

No log ratio is exponentiated unbounded: float32 overflows at 88 nats, and where a clip then discards an infinite ratio,
its gradient is 0 times infinity, so a finite loss would have a gradient of NaN.

Importing this module does not load torch, so the controller checks a loss and its arguments without it. A loss of your
own is a subclass of `PolicyLoss` in any file, named in the config as `file.py:Class`:

    class Reinforce(PolicyLoss):
        def __call__(self, tokens):
            return -(tokens.advantages * tokens.logprobs).sum(), {}
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from titan_rl.errors import ConfigError
from titan_rl.importing import import_name
from titan_rl.policy.config import LossConfig

if TYPE_CHECKING:
    from torch import Tensor

SHORT_NAMES = {
    "grpo": "titan_rl.policy.losses:GRPOLoss",
    "policy_gradient": "titan_rl.policy.losses:PolicyGradientLoss",
    "tis": "titan_rl.policy.losses:TruncatedImportanceLoss",
    "decoupled_ppo": "titan_rl.policy.losses:DecoupledPPOLoss",
}
"""Names that `trainer.loss.name` understands besides `pkg.mod:Class` and `file.py:Class`."""

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
    progress: float = 0.0
    """Share of the run's steps that were done before this one."""

    def select(self, mask: Tensor) -> TrainedTokens:
        """The tokens where `mask` ([N] bool) is True, possibly none; `global_count` stays."""
        return TrainedTokens(
            logprobs=self.logprobs[mask],
            entropies=self.entropies[mask],
            behaviour_logprobs=self.behaviour_logprobs[mask],
            advantages=self.advantages[mask],
            samples=self.samples[mask],
            global_count=self.global_count,
            progress=self.progress,
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


@dataclass(kw_only=True)
class BundledLoss(PolicyLoss):
    """Minus a surrogate, minus the entropy bonus, over the samples inside the band.

    The band is on the geometric mean of a sample's token ratios, its sequence-level ratio

        s = exp(1/|y| sum over its trained tokens of (logprob - behaviour logprob))

    which is GSPO's (Zheng et al. 2025, arXiv:2507.18071, eq. 7). GSPO clips with it; here a sample whose s is below
    `sequence_low` or above `sequence_high` is dropped as a whole (as sequence-level masks do that reject what trainer
    and engine disagree about). A sample is off by its mean, so one odd token of a long answer does not drop it.

    A masked sample adds nothing to loss and gradient, whatever its tokens hold, but counts in the step's number of
    trained tokens: the others do not weigh more for it. NaN is never masked, so it still ends the step.
    """

    metrics = {"clip_share": "mean", "masked_share": "mean", "entropy_bonus": "max"}

    entropy_bonus: float = 0.0
    """Weight of the entropy; at 0 the policy collapses to one answer sooner."""
    entropy_decay: float = 0.0
    """Share of the run over which the bonus falls linearly to 0, so that it may be large while the policy searches and
    is gone when it has found; 0: it stays."""
    sequence_low: float = 0.0
    """Lower end of the band; 0 drops no sample."""
    sequence_high: float = math.inf
    """Upper end of the band; inf drops no sample."""

    def __post_init__(self) -> None:
        if not 0 <= self.entropy_decay <= 1:
            raise ConfigError(f"trainer.loss.kwargs.entropy_decay is a share, 0 to 1, got {self.entropy_decay}")
        if not 0 <= self.sequence_low < self.sequence_high:
            raise ConfigError(
                "trainer.loss.kwargs: need 0 <= sequence_low < sequence_high, got "
                f"{self.sequence_low} and {self.sequence_high}"
            )

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
        left = max(0.0, 1 - tokens.progress / self.entropy_decay) if self.entropy_decay else 1.0
        bonus = self.entropy_bonus * left
        if bonus:
            loss = loss - bonus * tokens.entropies.sum()
        return loss, {"clip_share": clipped.sum(), "masked_share": masked, "entropy_bonus": loss.new_tensor(bonus)}

    def _inside_band(self, tokens: TrainedTokens) -> Tensor:
        """[N] bool, the same for all tokens of a sample."""
        log_ratio = (tokens.logprobs - tokens.behaviour_logprobs).detach()
        empty = log_ratio.new_zeros(int(tokens.samples[-1]) + 1)
        sums = empty.index_add(0, tokens.samples, log_ratio)
        counts = empty.index_add(0, tokens.samples, log_ratio.new_ones(len(log_ratio)))
        ratio = (sums / counts.clamp(min=1)).exp()
        outside = (ratio < self.sequence_low) | (ratio > self.sequence_high)
        return ~outside[tokens.samples]


@dataclass(kw_only=True)
class GRPOLoss(BundledLoss):
    """Clipped policy gradient with the group's advantages, and an entropy bonus.

    Per token, with r = exp(logprob - behaviour logprob) and advantage A:

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - entropy_bonus * entropy

    PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with the advantages of GRPO (Shao et al.
    2024, "DeepSeekMath", arXiv:2402.03300, eq. 3), without its KL term (see `trainer.kl`), and with every token
    weighted alike instead of every sample (DAPO, arXiv:2503.14476, eq. 8). r is taken against the weights that SAMPLED
    the token, however old; with asynchronous training this bounds how far an old sample can push.
    """

    clip_low: float = 0.2
    """Tokens with negative advantage stop pushing once r < 1 - clip_low."""
    clip_high: float = 0.2
    """Tokens with positive advantage stop pushing once r > 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip_low < 1:
            raise ConfigError(f"trainer.loss.kwargs.clip_low must be in [0, 1), got {self.clip_low}")
        if self.clip_high < 0:
            raise ConfigError(f"trainer.loss.kwargs.clip_high must be >= 0, got {self.clip_high}")

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


@dataclass(kw_only=True)
class TruncatedImportanceLoss(BundledLoss):
    """Truncated importance sampling: the ratio corrects for a sample's age, up to a cap.

    Per token -min(r, cap) A logprob - entropy_bonus * entropy, with r = exp(logprob - behaviour logprob) taken as a
    constant. The truncated weights of IMPALA's policy gradient (Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and
    sec. 4.2), per token; what Yao et al. (2025, "Your efficient RL framework secretly brings you off-policy RL
    training") apply between engine and trainer. The cap bounds the variance and biases towards the behaviour policy;
    a token that has become rarer weighs less, but no token ever stops pushing.
    """

    cap: float = 2.0
    """Largest weight of a token, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cap >= 1:
            raise ConfigError(f"trainer.loss.kwargs.cap must be at least 1, got {self.cap}")

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        ratio = probability_ratio(tokens.logprobs.detach(), tokens.behaviour_logprobs)
        return ratio.clamp(max=self.cap) * tokens.advantages * tokens.logprobs, ratio > self.cap


@dataclass(kw_only=True)
class DecoupledPPOLoss(BundledLoss):
    """AReaL's decoupled PPO at one optimizer step per batch: importance sampling without the heaviest tokens.

    Per token -r A logprob where r <= weight_cap, else 0, with r = exp(logprob - behaviour logprob) taken as a constant.

    The decoupled objective (Hilton et al. 2022, arXiv:2110.00641, sec. 3; Fu et al. 2025, arXiv:2505.24298, eq. 5)
    clips around the trainer's weights before the batch's first step and weighs tokens by their ratio to the behaviour
    policy. This trainer makes ONE step per batch, so the clip could never act and there are no arguments for it.
    Tokens above the cap are dropped, not cut to it, as in AReaL's implementation (`behav_imp_weight_cap`). Unbiased
    below the cap, but it does not bound how far old samples push; "grpo" does, and is the default for that.
    """

    weight_cap: float = 5.0
    """Tokens whose r is above it are dropped; inf drops none, and the variance grows with the age of the samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weight_cap > 1:
            raise ConfigError(f"trainer.loss.kwargs.weight_cap must be above 1, got {self.weight_cap}")

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
        ratio = probability_ratio(tokens.logprobs.detach(), tokens.behaviour_logprobs)
        dropped = ratio > self.weight_cap
        return ratio.masked_fill(dropped, 0.0) * tokens.advantages * tokens.logprobs, dropped


def kl_penalty(estimator: Literal["k1", "k2", "k3"], logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """An estimate of KL(current || reference) at every token [N]: the penalty that keeps the policy near a reference.

    With x = logprob - reference logprob of a token that the current policy sampled (Schulman 2020, "Approximating KL
    divergence"):

        k1   x                  unbiased, but noisy and of either sign
        k2   x^2 / 2            biased, never negative; its GRADIENT is the KL's own
        k3   exp(-x) - 1 + x    unbiased, never negative; GRPO's (Shao et al. 2024, arXiv:2402.03300, eq. 4)

    A good estimate need not be a good loss. The gradient of k1 itself is grad logprob, which is 0 in expectation (Tang
    and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477). The gradient of
    KL(current || reference) is the mean of x grad logprob, and that is the gradient of k2; so here k1 has the value x
    and the gradient of k2. The gradient of k3, (1 - exp(-x)) grad logprob, agrees with it near x = 0; far from 0 it is
    that of KL(reference || current).

    No estimate is weighted for the age of a sample. k3 replaces x below -`LARGEST_LOG_RATIO` by that bound: exp(-x)
    would overflow, and one token's gradient would drown all others long before.
    """
    difference = logprobs - reference_logprobs
    match estimator:
        case "k1":
            square = difference.square() / 2
            return square + (difference - square).detach()
        case "k2":
            return difference.square() / 2
        case "k3":
            difference = difference.clamp(min=-LARGEST_LOG_RATIO)
            return (-difference).exp() - 1 + difference


def build_loss(config: LossConfig) -> PolicyLoss:
    """The loss that `config` names; raises ConfigError where the name or the arguments are wrong."""
    loss_class = import_name(config.name, SHORT_NAMES)
    if not (isinstance(loss_class, type) and issubclass(loss_class, PolicyLoss)):
        raise ConfigError(f"trainer.loss.name: {config.name!r} is no subclass of titan_rl.policy.losses.PolicyLoss")
    try:
        return loss_class(**config.kwargs)
    except TypeError as error:
        raise ConfigError(f"trainer.loss.kwargs does not fit {config.name!r}: {error}") from error
