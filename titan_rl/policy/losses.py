"""The objective of a step: an algorithm's loss, within what every loss can have, and the KL term.

Importing this module does not load torch, so the controller checks a loss and its arguments without it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from titan_rl.bounds import NotNegative, Share
from titan_rl.errors import ConfigError, TrainingError
from titan_rl.importing import import_name, user_code
from titan_rl.policy.algorithms import short_names
from titan_rl.policy.algorithms.base import AGGREGATIONS, LARGEST_LOG_RATIO, Gains, TrainedTokens, bounded_exp
from titan_rl.policy.config import KLEstimator, LossConfig

if TYPE_CHECKING:
    from torch import Tensor

    from titan_rl.policy.packing import MiniBatch, PackingPlan


@dataclass(kw_only=True)
class Objective:
    """Minus the gains of a loss, minus the entropy bonus, over the samples inside the band, summed over tokens.

    The band is on the geometric mean of a sample's token ratios, its sequence-level ratio

        s = exp(1/|y| sum over its trained tokens of (logprob - behaviour logprob))

    which is GSPO's (arXiv:2507.18071, eq. 7). GSPO clips with it; here a sample whose s is below `sequence_low` or
    above `sequence_high` is dropped as a whole (as sequence-level masks do that reject what trainer and engine disagree
    about). A sample is off by its mean, so one odd token of a long answer does not drop it.

    A masked sample adds nothing to loss and gradient, whatever its tokens hold, but counts in the step's number of
    trained tokens: the others do not weigh more for it. NaN is never masked, so it still ends the step.
    """

    function: Callable[..., Gains]
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Of the function."""
    aggregation: Literal["", "token_mean", "sample_mean", "sample_sum"] = ""
    """See `AGGREGATIONS`; empty: the function's own."""
    entropy_bonus: NotNegative = 0.0
    """Weight of the entropy; at 0 the policy collapses to one answer sooner."""
    entropy_decay: Share = 0.0
    """Share of the run over which the bonus falls linearly to 0, so that it may be large while the policy searches and
    is gone when it has found; 0: it stays."""
    sequence_low: NotNegative = 0.0
    """Lower end of the band; 0 drops no sample."""
    sequence_high: NotNegative = math.inf
    """Upper end of the band; inf drops no sample."""

    def __post_init__(self) -> None:
        self.aggregation = self.aggregation or getattr(self.function, "aggregation", "token_mean")
        if self.aggregation not in AGGREGATIONS:
            raise ConfigError(f"trainer.loss.kwargs.aggregation is one of {', '.join(AGGREGATIONS)}")
        if not self.sequence_low < self.sequence_high:
            said = f"need sequence_low < sequence_high, got {self.sequence_low} and {self.sequence_high}"
            raise ConfigError(f"trainer.loss.kwargs: {said}")

    def divisor(self, plan: PackingPlan | MiniBatch) -> int:
        """What the sum over all micro-batches and ranks of an optimizer step is divided by."""
        return plan.trained_tokens if self.aggregation == "token_mean" else plan.samples

    def total(self, values: Tensor, tokens: TrainedTokens) -> Tensor:
        """The sum of values [N] of these tokens as `divisor` will divide it."""
        return (values / tokens.lengths if self.aggregation == "sample_mean" else values).sum()

    def __call__(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over N >= 1 tokens, and detached: over how many tokens a gradient was bounded or removed, how
        many were masked, and the bonus. All scalars."""
        masked = tokens.samples.new_zeros(())
        if self.sequence_low > 0 or self.sequence_high < math.inf:
            mean_ratio = bounded_exp(tokens.sample_mean(tokens.log_ratio.detach()))
            outside = (mean_ratio < self.sequence_low) | (mean_ratio > self.sequence_high)
            masked = outside.sum()
            tokens = tokens.select(~outside)
        gains, bounded = self.function(tokens, **self.kwargs)
        if gains.shape != tokens.logprobs.shape or bounded.shape != tokens.logprobs.shape:
            found = f"{list(gains.shape)} and {list(bounded.shape)}"
            raise TrainingError(f"the loss returned {found} for {len(tokens.samples)} tokens")
        left = max(0.0, 1 - tokens.progress / self.entropy_decay) if self.entropy_decay else 1.0
        bonus = self.entropy_bonus * left
        if bonus:
            gains = gains + bonus * tokens.entropies
        loss = -self.total(gains, tokens)
        return loss, {"clip_share": bounded.sum(), "masked_share": masked, "entropy_bonus": loss.new_tensor(bonus)}


OF_EVERY_LOSS = frozenset(each.name for each in fields(Objective)) - {"function", "kwargs"}
"""Arguments in `trainer.loss.kwargs` that every loss takes."""


def kl_penalty(estimator: KLEstimator, logprobs: Tensor, reference_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """An estimate of KL(current || reference) at every token [N]: the penalty that keeps the policy near a reference.

    With x = logprob - reference logprob of a token that the current policy sampled (Schulman 2020, "Approximating KL
    divergence"):

        k1   x                  unbiased, but noisy and of either sign
        k2   x^2 / 2            biased, never negative; its GRADIENT is the KL's own
        k3   exp(-x) - 1 + x    unbiased, never negative; GRPO's (Shao et al. 2024, arXiv:2402.03300, eq. 4)
        k3_corrected            k3 times `ratio`, the current to the behaviour policy's probability: unbiased for old
                                samples too, in value and GRADIENT (DeepSeek-AI 2025, arXiv:2512.02556, section 3.1)

    A good estimate need not be a good loss. The gradient of k1 itself is grad logprob, which is 0 in expectation (Tang
    and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477). The gradient of
    KL(current || reference) is the mean of x grad logprob, and that is the gradient of k2; so here k1 has the value x
    and the gradient of k2. The gradient of k3, (1 - exp(-x)) grad logprob, agrees with it near x = 0; far from 0 it is
    that of KL(reference || current). In the reward (`trainer.kl.in_reward`) k1 is right, for whole samples too.

    k1, k2 and k3 are not weighted for the age of a sample. k3 replaces x below -`LARGEST_LOG_RATIO` by that bound:
    exp(-x) would overflow, and one token's gradient would drown all others long before.
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
        case "k3_corrected":
            return ratio * kl_penalty("k3", logprobs, reference_logprobs, ratio)


def build_loss(config: LossConfig) -> Objective:
    """The objective that `config` names; `run.checks` compares its arguments with those of the function. Raises
    ConfigError: the name is none, or an argument is one of every loss."""
    function = import_name(config.name, bundled := short_names("loss"))
    if config.name not in bundled:
        function = _bounded(function, config)
    if taken := ", ".join(sorted(OF_EVERY_LOSS & inspect.signature(function).parameters.keys())):
        raise ConfigError(f"{config.name!r} has an argument {taken}, which is one of every loss: call it otherwise")
    own = {name: value for name, value in config.kwargs.items() if name not in OF_EVERY_LOSS}
    of_every = {name: value for name, value in config.kwargs.items() if name in OF_EVERY_LOSS}
    return Objective(function=function, kwargs=own, **of_every)


def _bounded(function: Callable[..., Gains], config: LossConfig) -> Callable[..., Gains]:
    """A loss of the user's own: a ConfigError names it where it raises or does not return. It has a thread to itself,
    which a call that computes for ever keeps until the process ends."""
    thread, where = ThreadPoolExecutor(1, thread_name_prefix="loss"), f"trainer.loss.name {config.name}"

    @functools.wraps(function)
    def call(tokens: TrainedTokens, **kwargs: Any) -> Gains:
        answer = thread.submit(function, tokens, **kwargs)
        if not wait([answer], config.seconds).done:
            raise ConfigError(f"{where} did not return within {config.seconds:g} s (trainer.loss.seconds)")
        with user_code(where):
            gains, bounded = answer.result()
            return gains, bounded

    return call
