"""Dual-clip PPO: a bad token that became likely pushes down only so hard. (arXiv:1912.09729)

When     old samples with negative advantages make steps explode.
Is       PPO's clipped surrogate, and where A < 0 at least c A, eq. 5.
Is not   a bound for positive advantages, which PPO's own clip holds.
Differs  not from the equation.
Run      --trainer.loss.name dual_clip
"""

from titan_rl.bounds import MoreThanOne, NotNegative, Share
from titan_rl.policy.algorithms.base import Gains, TrainedTokens, clipped


def loss(tokens: TrainedTokens, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2, c: MoreThanOne = 3.0) -> Gains:
    gains, bites = clipped(tokens.ratio, tokens.advantages, clip_low, clip_high)
    least = c * tokens.advantages
    held = (tokens.advantages < 0) & (gains < least)
    return gains.where(~held, least), bites | held
