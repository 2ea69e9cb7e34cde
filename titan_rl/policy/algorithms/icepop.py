"""IcePop: tokens that trainer and engine disagree about are left out, on both sides. (arXiv:2510.18855)

When     the engine computes otherwise than the trainer, as with mixtures of experts, and some tokens are far off.
Is       sg[r] A log pi where low <= r <= high, else 0: eq. 3, with M of eq. 2. sg: as a constant.
Is not   a truncation: what is outside has no gradient, and counts in the denominator.
Differs  there is one ratio here, for age and engine alike, and so no clip inside the band. Every token weighs
         alike instead of every sample: `aggregation` "sample_mean" is the paper's.
Run      --trainer.loss.name icepop
"""

from titan_rl.bounds import AtLeastOne, Share
from titan_rl.policy.algorithms.base import Gains, TrainedTokens


def loss(tokens: TrainedTokens, *, low: Share = 0.5, high: AtLeastOne = 5.0) -> Gains:
    weight = tokens.weight
    outside = (weight < low) | (weight > high)
    return weight.masked_fill(outside, 0.0) * tokens.advantages * tokens.logprobs, outside
