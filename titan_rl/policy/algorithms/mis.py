"""Masked importance sampling: an answer counts by its whole ratio, or not at all. (Liu et al. 2025, "When speed kills
stability")

When     trainer and engine disagree about whole answers, and those are better left out.
Is       sg[w] A log pi with w the product of the answer's ratios, 0 where w > cap. sg: as a constant. The source is a
         blog post; its equations have no numbers.
Is not   for long answers far off-policy: the product soon is 0 or above every cap.
Differs  an answer is what one sample trains.
Run      --trainer.loss.name mis
"""

from titan_rl.bounds import AtLeastOne
from titan_rl.policy.algorithms.base import Gains, TrainedTokens, bounded_exp


def loss(tokens: TrainedTokens, *, cap: AtLeastOne = 2.0) -> Gains:
    whole = bounded_exp(tokens.sample_sum(tokens.log_ratio.detach()))
    dropped = whole > cap
    return whole.masked_fill(dropped, 0.0) * tokens.advantages * tokens.logprobs, dropped
