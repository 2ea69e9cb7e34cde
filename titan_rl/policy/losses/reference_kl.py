"""The penalty that keeps the policy near a reference: an estimate of KL(current || reference) per sampled token.

With x = logprob - reference logprob of a token that the current policy sampled (Schulman 2020, "Approximating KL
divergence"):

    k1   x                  unbiased, but noisy and of either sign
    k2   x^2 / 2            biased, never negative; its GRADIENT is the KL's own
    k3   exp(-x) - 1 + x    unbiased, never negative; GRPO's (Shao et al. 2024, arXiv:2402.03300, eq. 4)

A good estimate need not be a good loss. The gradient of k1 itself is grad logprob, which is 0 in expectation (Tang and
Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477). The gradient of
KL(current || reference) is the mean of x grad logprob, and that is the gradient of k2; so here k1 has the value x and
the gradient of k2. The gradient of k3, (1 - exp(-x)) grad logprob, agrees with it near x = 0; far from 0 it is that of
KL(reference || current).

No estimate is weighted for the age of a sample. k3 replaces x below -`LARGEST_LOG_RATIO` by that bound: exp(-x) would
overflow, and one token's gradient would drown all others long before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from titan_rl.policy.losses.base import LARGEST_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_penalty(estimator: Estimator, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N] the estimate at every token, with the gradient that is described above.

    Args:
        logprobs: [N] under the current weights; carries gradient.
        reference_logprobs: [N] of the same tokens; no gradient.
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
