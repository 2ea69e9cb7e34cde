"""Soft Adaptive Policy Optimization: a smooth gate instead of a clip. (arXiv:2511.20347)

When     a hard clip throws away too much, and none lets old samples push too far.
Is       f(r) A with f(r) = 4 / tau * sigmoid(tau (r - 1)), eq. 5 and 6, tau by the sign of the advantage; every answer
         weighs alike. The gate's slope is 1 at r = 1 and falls to both sides.
Is not   a bound: every token keeps some gradient.
Differs  not from the equations.
Run      --trainer.loss.name sapo
"""

from __future__ import annotations

from titan_rl.bounds import Positive
from titan_rl.policy.algorithms.base import Gains, TrainedTokens


def loss(tokens: TrainedTokens, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> Gains:
    tau = tokens.advantages.new_tensor(tau_positive).where(tokens.advantages > 0, tau_negative)
    return 4 / tau * (tau * (tokens.ratio - 1)).sigmoid() * tokens.advantages, tokens.none()


loss.aggregation = "sample_mean"  # type: ignore[attr-defined]
