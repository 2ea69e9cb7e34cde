"""Divergence PPO: a token stops pushing when the distribution has moved, not when its ratio has. (arXiv:2602.04879)

When     vocabularies are large: a rare token's ratio leaves PPO's band though nothing has moved, a likely one's stays
         in it though much has.
Is       r A, without the tokens that push away from r = 1 and whose divergence is above `limit`: total variation
         |pi - mu| or KL(mu || pi), both of the sampled token against all others together, eq. 12 to 14.
Is not   exact divergence over the vocabulary: it is a lower bound of that.
Differs  the limit's default is ours.
Run      --trainer.loss.name dppo
"""

from typing import Literal

from titan_rl.bounds import Positive
from titan_rl.policy.algorithms.base import Gains, TrainedTokens


def loss(tokens: TrainedTokens, *, divergence: Literal["tv", "kl"] = "tv", limit: Positive = 0.15) -> Gains:
    ratio, now, before = tokens.ratio, tokens.logprobs.detach().exp(), tokens.behaviour_logprobs.exp()
    if divergence == "tv":
        moved = (now - before).abs()
    else:
        rest = (1 - before).clamp(min=1e-7)
        moved = -before * tokens.log_ratio.detach() + rest * (rest / (1 - now).clamp(min=1e-7)).log()
    stopped = (moved > limit) & ((ratio.detach() - 1) * tokens.advantages > 0)
    return ratio.masked_fill(stopped, 0.0) * tokens.advantages, stopped
