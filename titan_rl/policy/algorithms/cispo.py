"""CISPO: the importance weight is clipped and not the update, so no token loses its gradient. (arXiv:2506.13585)

When     rare tokens that turn an answer ("however", "wait") would be clipped away by PPO.
Is       sg[clip(r, 1 - low, 1 + high)] A log pi, eq. 4 and 5, all tokens alike. sg: as a constant.
Is not   PPO's surrogate with its min: the weight carries no gradient.
Differs  no lower bound by default (low 1), as the authors run it; high 4 is within what ScaleRL (arXiv:2510.13786)
         found to make no difference.
Run      --trainer.loss.name cispo
"""

from __future__ import annotations

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms.base import Gains, TrainedTokens


def loss(tokens: TrainedTokens, *, low: Share = 1.0, high: NotNegative = 4.0) -> Gains:
    weight = tokens.weight
    held = weight.clamp(1 - low, 1 + high)
    return held * tokens.advantages * tokens.logprobs, held != weight
