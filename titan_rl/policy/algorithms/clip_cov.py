"""Clip-Cov: the few tokens that carry the collapse of the entropy lose their gradient. (arXiv:2505.22617)

When     entropy falls to 0 early and an entropy bonus makes the policy noisy.
Is       r A, without the tokens whose covariance of logprob and advantage is within [low, high], eq. 10 to 12.
Is not   a clip by the ratio.
Differs  a token's covariance is A (logprob - mean of its sample): the group's mean advantage is 0, and a mean over the
         batch would make the gradient depend on what else is computed. All tokens in the band are taken, not a drawn
         share of them.
Run      --trainer.loss.name clip_cov
"""

from titan_rl.policy.algorithms.base import Gains, TrainedTokens, covariance


def loss(tokens: TrainedTokens, *, low: float = 1.0, high: float = 5.0) -> Gains:
    found = covariance(tokens)
    held = (found >= low) & (found <= high)
    return tokens.ratio.masked_fill(held, 0.0) * tokens.advantages, held
