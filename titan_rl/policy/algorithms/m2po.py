"""M2PO: the tokens that are furthest off are left out until the second moment is small. (arXiv:2510.01161)

When     samples are many versions old and a clip throws away most of what they teach.
Is       r A, without as many of the tokens with the largest (log r)^2 as it takes for the mean of the others to be at
         most `limit`; only tokens that push away from r = 1 are counted and left out, as PPO's clip does.
Is not   a bound for single tokens.
Differs  the mean is over a sample's tokens and not over the batch, so that the gradient does not depend on which
         samples are computed together.
Run      --trainer.loss.name m2po
"""

from __future__ import annotations

from titan_rl.bounds import Positive
from titan_rl.policy.algorithms.base import Gains, TrainedTokens


def loss(tokens: TrainedTokens, *, limit: Positive = 0.04) -> Gains:
    ratio, square = tokens.ratio, tokens.log_ratio.detach().double().square()
    pushes = (ratio.detach() - 1) * tokens.advantages > 0
    square = square.where(pushes, 0.0)
    order = square.argsort(stable=True)
    order = order[tokens.samples[order].argsort(stable=True)]  # by sample, and within one the smallest first
    sums, samples = square[order].cumsum(0), tokens.samples[order]
    rank = pushes[order].double().cumsum(0)
    first = samples.diff(prepend=samples[:1] - 1) != 0
    start = first.nonzero()[first.cumsum(0) - 1, 0] if len(samples) else samples
    before = sums.new_zeros(len(sums) + 1), rank.new_zeros(len(rank) + 1)
    before[0][1:], before[1][1:] = sums, rank
    means = (sums - before[0][start]) / (rank - before[1][start]).clamp(min=1)
    stopped = pushes.new_zeros(len(pushes))
    stopped[order] = pushes[order] & (means > limit)
    return ratio.masked_fill(stopped, 0.0) * tokens.advantages, stopped
