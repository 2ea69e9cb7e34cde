"""GMPO: the geometric mean of an answer's ratios, so that one odd token moves little. (arXiv:2507.20673)

When     outlying ratios make GRPO's steps jump.
Is       A exp(mean over the answer's tokens of log r, each held where it would push further), eq. 4: at most `clip`
         nats where A > 0, at least -`clip` where A < 0.
Is not   GSPO: tokens are clipped before the mean is taken, answers are not.
Differs  not from the equation; the clip is in nats, as e^-0.4 and e^0.4 in the paper.
Run      --trainer.loss.name gmpo
"""

from __future__ import annotations

from titan_rl.bounds import Positive
from titan_rl.policy.algorithms.base import Gains, TrainedTokens, bounded_exp


def loss(tokens: TrainedTokens, *, clip: Positive = 0.4) -> Gains:
    log_ratio = tokens.log_ratio
    held = log_ratio.clamp(max=clip).where(tokens.advantages > 0, log_ratio.clamp(min=-clip))
    return tokens.advantages * bounded_exp(tokens.sample_mean(held)), (held != log_ratio) & (tokens.advantages != 0)


loss.aggregation = "sample_mean"  # type: ignore[attr-defined]
