"""M2PO: the tokens that are furthest off are left out until the second moment is small. (arXiv:2510.01161)

When     samples are many versions old and a clip throws away most of what they teach.
Is       r A, without as many of the tokens with the largest (log r)^2 as it takes for the mean of the others to be at
         most `limit`; only tokens that push away from r = 1 are counted and left out, as PPO's clip does: eq. 4 and 5,
         algorithm 1.
Is not   a bound for single tokens.
Differs  the mean is over a sample's tokens and not over the batch, so that the gradient does not depend on which
         samples are computed together.
Run      --trainer.loss.name m2po
"""

import numpy as np

from titan_rl.bounds import Positive
from titan_rl.policy.algorithms.base import Gains, TrainedTokens


def loss(tokens: TrainedTokens, *, limit: Positive = 0.04) -> Gains:
    ratio = tokens.ratio
    pushes = (ratio.detach() - 1) * tokens.advantages > 0
    square = tokens.log_ratio.detach().square()
    stopped = np.zeros(len(square), bool)
    samples, candidates, squares = (each.cpu().numpy() for each in (tokens.samples, pushes, square.double()))
    for sample in np.unique(samples):
        places = np.flatnonzero((samples == sample) & candidates)
        places = places[np.argsort(squares[places], kind="stable")]  # the smallest first
        means = np.cumsum(squares[places]) / np.arange(1, len(places) + 1)
        stopped[places[means > limit]] = True
    bounded = tokens.samples.new_tensor(stopped).bool()
    return ratio.masked_fill(bounded, 0.0) * tokens.advantages, bounded
