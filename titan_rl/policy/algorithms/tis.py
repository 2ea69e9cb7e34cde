"""Truncated importance sampling: the ratio corrects for a sample's age, up to a cap. (arXiv:1802.01561)

When     samples are old and no token should lose its gradient.
Is       sg[min(r, cap)] A log pi, eq. 1 and section 4.2 of IMPALA, per token; what Yao et al. (2025, "Your efficient RL
         framework secretly brings you off-policy RL training") do between engine and trainer. sg: as a constant.
Is not   unbiased: the cap bounds the variance and biases towards the behaviour policy.
Differs  there is one ratio here, for age and engine alike.
Run      --trainer.loss.name tis
"""

from titan_rl.bounds import AtLeastOne
from titan_rl.policy.algorithms.base import Gains, TrainedTokens


def loss(tokens: TrainedTokens, *, cap: AtLeastOne = 2.0) -> Gains:
    weight = tokens.weight
    return weight.clamp(max=cap) * tokens.advantages * tokens.logprobs, weight > cap
