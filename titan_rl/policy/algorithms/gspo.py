"""Group Sequence Policy Optimization: whole answers are clipped by their mean ratio. (arXiv:2507.18071)

When     single tokens' ratios are noise, as with mixtures of experts and long answers.
Is       s = exp(mean over the answer's tokens of log r), eq. 7; min(s A, clip(s, 1 - low, 1 + high) A), eq. 5, with
         every answer weighing alike.
Is not   a clip of tokens: an answer pushes as a whole or not at all. The bounds are a thousandth of PPO's.
Differs  an answer is what one sample trains: with an edited history, one branch.
Run      --trainer.loss.name gspo
"""

from __future__ import annotations

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms.base import Gains, TrainedTokens, bounded_exp, clipped


def loss(tokens: TrainedTokens, *, clip_low: Share = 3e-4, clip_high: NotNegative = 4e-4) -> Gains:
    return clipped(bounded_exp(tokens.sample_mean(tokens.log_ratio)), tokens.advantages, clip_low, clip_high)


loss.aggregation = "sample_mean"  # type: ignore[attr-defined]
