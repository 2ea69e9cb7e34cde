"""REINFORCE: the plain policy gradient. (Williams 1992, doi:10.1007/BF00992696)

When     training is strictly on-policy (`loop.max_staleness` 0), or to compare others with.
Is       A log pi per token, the episodic form, eq. 11: every token counts as if the current weights had drawn it.
Is not   corrected for the age of samples: with old ones its gradient is biased, the longer the lag the more.
Differs  not from the equation; the baseline is in the advantage.
Run      --trainer.loss.name reinforce
"""

from titan_rl.policy.algorithms.base import Gains, TrainedTokens


def loss(tokens: TrainedTokens) -> Gains:
    return tokens.advantages * tokens.logprobs, tokens.none()
