"""Metrics of one train step: gathered per micro-batch without waiting for the device, reduced over ranks.

Sums are reduced before each optimizer step, and say whether loss and gradient are finite anywhere; maxima at the end.
Every rank reports the same numbers: sums over the tokens of all data-parallel ranks, in all optimizer steps,
each token once in each, divided only after they were summed.

How far the samples are off-policy is measured on every trained token, whatever the loss makes of it, from the weight
w = exp(logprob - behaviour logprob) of a token that the behaviour policy sampled (Schulman 2020, "Approximating KL
divergence"; Kong 1992 for the effective sample size):

    kl_k3                   mean of w - 1 - log w: estimates KL(behaviour || current), unbiased and never negative
    effective_sample_size   (sum of w)^2 / sum of w^2 / tokens: 1 on-policy, 1 / tokens when one token is all
    weight_mean, weight_max the mean is 1 in expectation; far from it the sample says little about the policy

With a reference policy, and v = exp(reference logprob - logprob) of the same tokens:

    reference_kl_k3         mean of v - 1 - log v: estimates KL(current || reference), never negative

How far the engine is from the trainer is measured on the tokens that this very version sampled, where w should be 1 at
the weights before the batch: logprob_difference_mean and _max of |log w|, and logprob_outside_share, how many have w
outside [0.9, 1.1].
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.policy.config import LogprobAlarmConfig
from titan_rl.weights.ranks import Ranks

_SUMS = (
    "tokens",
    "loss",
    "entropy",
    "kl_k3",
    "weight",
    "weight_square",
    "reference_kl_k3",
    "on_policy_tokens",
    "logprob_difference",
    "logprob_outside",
    "clip_share",
    "masked_share",
)
_MAXIMA = ("weight_max", "logprob_difference_max", "entropy_bonus")

RATIO_BAND = (0.9, 1.1)
"""Probability ratios of trainer and engine outside of it are counted as disagreement."""

_LARGEST_LOG_WEIGHT = 300.0
"""Nats, to both sides; a token beyond counts as one at it. Its square, e^600, and a sum of many stay below float64's
e^709, and e^-600 is above 0: otherwise the effective sample size would be infinity by infinity or 0 by 0."""


class StepMetrics:
    """For each optimizer step add micro-batches and `reduce_sums`, then `report` (or `describe_failure`). `counted`:
    False on ranks that repeat another's tokens (tensor parallelism); they add nothing to sums. `reference`: whether
    there is a reference policy."""

    def __init__(self, *, counted: bool, reference: bool = False) -> None:
        self._ranks = Ranks(dist.group.WORLD)
        self.counted = counted
        self._reference = reference
        self._sums: Tensor | None = None  # float64, of what `_SUMS` names
        self._maxima: Tensor | None = None  # float64, of what `_MAXIMA` names
        self._totals = dict.fromkeys(_SUMS, 0.0)
        self.kl = 0.0
        """`kl_k3` of the last optimizer step, after `reduce_sums`: the same on every rank."""
        self._failures: list[str] = []  # of this rank, in the last optimizer step
        self.finite = True
        """Whether loss and gradient of the last optimizer step are finite on all ranks; after `reduce_sums`."""

    def add(
        self,
        *,
        loss: Tensor,
        loss_metrics: Mapping[str, Tensor],
        entropies: Tensor,
        log_ratio: Tensor,
        log_ratio_before: Tensor,
        on_policy: Tensor,
        reference_log_ratio: Tensor | None,
    ) -> None:
        """One micro-batch of N >= 1 trained tokens; nothing here carries gradient.

        Args:
            loss, loss_metrics: what the objective returned; {}: a warm-up's.
            entropies: [N] nats.
            log_ratio: [N] logprob - behaviour logprob.
            log_ratio_before: [N] the same at the weights before the batch.
            on_policy: [N] bool, whether these sampled the token, and it is the first time that it is added.
            reference_log_ratio: [N] logprob - reference logprob; None: there is no reference.
        """
        # float64: the weights are squared, and a float32 weight of e^45 is all it takes to overflow.
        log_ratio = log_ratio.double()
        weight = log_ratio.clamp(-_LARGEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT).exp()
        before = torch.where(on_policy, log_ratio_before.double(), 0.0)
        difference, (low, high) = before.abs(), map(math.log, RATIO_BAND)
        away = log_ratio.new_zeros(1) if reference_log_ratio is None else reference_log_ratio.double()
        values = {
            **dict.fromkeys(("clip_share", "masked_share", "entropy_bonus"), weight.new_zeros(())),
            **{name: value.detach().double() for name, value in loss_metrics.items()},
            "tokens": torch.full_like(weight, 1.0).sum(),
            "loss": loss.double(),
            "entropy": entropies.sum().double(),
            "kl_k3": (weight - 1 - log_ratio).sum(),
            "weight": weight.sum(),
            "weight_square": weight.square().sum(),
            "reference_kl_k3": (away.clamp(min=-_LARGEST_LOG_WEIGHT).neg().exp() - 1 + away).sum(),
            "on_policy_tokens": on_policy.sum().double(),
            "logprob_difference": difference.sum(),
            "logprob_outside": ((before < low) | (before > high)).sum().double(),
            "weight_max": weight.max(),
            "logprob_difference_max": difference.max(),
        }
        sums = torch.stack([values[name] for name in _SUMS])
        maxima = torch.stack([values[name] for name in _MAXIMA])
        self._sums = sums if self._sums is None else self._sums + sums
        self._maxima = maxima if self._maxima is None else torch.maximum(self._maxima, maxima)

    def reduce_sums(self, grad_norm: float, *, gradient_finite: bool) -> None:
        """Collective. Afterwards `finite` and the sums are the same on every rank."""
        own = torch.zeros(len(_SUMS), dtype=torch.float64) if self._sums is None else self._sums.cpu()
        self._sums = None
        loss = float(own[_SUMS.index("loss")])
        looked = {f"loss is {loss}": math.isfinite(loss), f"gradient norm is {grad_norm}": gradient_finite}
        self._failures = [what for what, finite in looked.items() if not finite]
        totals = torch.cat([own.new_tensor([len(self._failures)]), own if self.counted else torch.zeros_like(own)])
        self._ranks.add(totals)
        failures, *sums = totals.tolist()
        self.finite = failures == 0
        step = dict(zip(_SUMS, sums, strict=True))
        self.kl = step["kl_k3"] / step["tokens"] if step["tokens"] else 0.0
        self._totals = {name: self._totals[name] + step[name] for name in _SUMS}

    @property
    def engine_difference(self) -> tuple[float, float]:
        """Mean |logprob difference| and share outside `RATIO_BAND` over on-policy tokens; 0 where there are none."""
        total, count = self._totals, self._totals["on_policy_tokens"]
        return (total["logprob_difference"] / count, total["logprob_outside"] / count) if count else (0.0, 0.0)

    def describe_failure(self) -> str:
        """Collective. Which ranks found what, in words."""
        everyone = self._ranks.gather(self._failures)
        # The gradient is a sum over ranks, so all see it spoilt; the loss tells whose samples did it.
        blamed = {rank: texts for rank, texts in enumerate(everyone) if any(text.startswith("loss") for text in texts)}
        found = blamed or {rank: texts for rank, texts in enumerate(everyone) if texts}
        return "; ".join(f"rank {rank}: {', '.join(texts)}" for rank, texts in found.items())

    def report(self, *, divisor: float) -> dict[str, float]:
        """Collective. The loss, whose sum is divided by `divisor`, of all optimizer steps together; means per trained
        token of the step; and maxima over all ranks."""
        empty = torch.full((len(_MAXIMA),), -math.inf, dtype=torch.float64)
        maxima = empty if self._maxima is None else self._maxima.cpu()
        self._ranks.maximum(maxima)
        top = dict(zip(_MAXIMA, maxima.tolist(), strict=True))
        total = self._totals
        tokens = total["tokens"]
        difference_mean, outside_share = self.engine_difference
        return {
            "loss": total["loss"] / divisor,
            **{name: total[name] / tokens for name in ("entropy", "kl_k3", "clip_share", "masked_share")},
            **({"reference_kl_k3": total["reference_kl_k3"] / tokens} if self._reference else {}),
            "weight_mean": total["weight"] / tokens,
            "weight_max": top["weight_max"],
            "effective_sample_size": total["weight"] ** 2 / total["weight_square"] / tokens,
            "on_policy_tokens": total["on_policy_tokens"],
            "logprob_difference_mean": difference_mean,
            "logprob_difference_max": top["logprob_difference_max"],
            "logprob_outside_share": outside_share,
            "entropy_bonus": top["entropy_bonus"],
        }


def logprob_alarm(config: LogprobAlarmConfig, mean: float, outside_share: float) -> tuple[str, bool]:
    """The warning about this `StepMetrics.engine_difference`, empty where all is well, and whether it ends the run. NaN
    is the worst disagreement, also where a limit is off."""
    found = []
    fatal = math.isnan(mean) or 0 < config.stop_mean < mean
    if fatal or 0 < config.mean < mean:
        found.append(
            f"their mean logprob difference is {mean:.3g} nats (trainer.logprob_alarm.mean {config.mean:g}, stop_mean "
            f"{config.stop_mean:g})"
        )
    if 0 < config.outside_share < outside_share:
        found.append(
            f"{outside_share:.1%} of the ratios are off by more than a tenth "
            f"(trainer.logprob_alarm.outside_share {config.outside_share:.0%})"
        )
    said = f"trainer and generators disagree about tokens that this very version sampled: {'; '.join(found)}"
    return said if found else "", fatal
