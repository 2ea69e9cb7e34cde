"""Tapered off-policy REINFORCE: good answers push fully, bad ones by how likely they still are. (arXiv:2503.14286)

When     samples are far off-policy, or come from elsewhere.
Is       A log pi where A > 0; sg[min(w, 1)] A log pi where A < 0, with w the product of the answer's ratios, eq. 8 with
         the paper's limits [1, 1] and [0, 1]. sg: as a constant.
Is not   a clip: an answer that the policy no longer gives is no longer pushed down, which is what would explode.
Differs  not from the equation; the baseline is in the advantage.
Run      --trainer.loss.name topr
"""

from __future__ import annotations

from titan_rl.policy.algorithms.base import Gains, TrainedTokens, bounded_exp


def loss(tokens: TrainedTokens) -> Gains:
    whole = bounded_exp(tokens.sample_sum(tokens.log_ratio.detach())).clamp(max=1.0)
    tapered = (tokens.advantages < 0) & (whole < 1)
    return whole.where(tokens.advantages < 0, 1.0) * tokens.advantages * tokens.logprobs, tapered
