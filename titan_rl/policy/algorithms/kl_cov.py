"""KL-Cov: the few tokens that carry the collapse of the entropy are held back by a KL penalty. (arXiv:2505.22617)

When     as Clip-Cov, more gently.
Is       r A, minus weight * (log r)^2 / 2 for the tokens whose covariance of logprob and advantage is above `limit`,
         eq. 10, 13 and 14.
Is not   a KL term for all tokens, which is `trainer.kl`.
Differs  the covariance is `clip_cov`'s; tokens are chosen by a limit and not by a share of the batch; the penalty is
         k2, whose gradient is the KL's own near r = 1.
Run      --trainer.loss.name kl_cov
"""

from titan_rl.bounds import NotNegative
from titan_rl.policy.algorithms.base import Gains, TrainedTokens, covariance


def loss(tokens: TrainedTokens, *, limit: float = 1.0, weight: NotNegative = 1.0) -> Gains:
    held = covariance(tokens) > limit
    penalty = weight * tokens.log_ratio.square() / 2
    return tokens.ratio * tokens.advantages - penalty.where(held, 0.0), held
