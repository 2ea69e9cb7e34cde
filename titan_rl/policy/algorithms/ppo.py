"""Proximal Policy Optimization, with a learned value head. (arXiv:1707.06347; advantages: arXiv:1506.02438)

When     a reward is far from the tokens that earned it: rewards are compared with values and not with those of a group.
Is       min(u A, clip(u, 1 - low, 1 + high) A) with u = pi / pi_prox, eq. 7; pi_prox are the weights before the batch's
         first optimizer step. A is GAE over the trained tokens of a sample (eq. 16 of the second paper), standardized
         over the batch; the credit of `rollout.advantage` is where its rewards come from: here, the rewards themselves.
Is not   corrected for the age of samples: `decoupled_ppo` is, with the same critic. Without `trainer.critic` the
         advantages are what credit says, for every token of a rollout alike.
Differs  the value head is one linear layer on the policy's last hidden rows, not a model of its own; its clip is as in
         the authors' code, not in the paper. Tokens that were not sampled are no steps, so no reward is lost on them.
Run      --trainer.loss.name ppo --rollout.advantage.name ppo --trainer.critic.coefficient 0.5 --trainer.minibatches 4
"""

from collections.abc import Sequence

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms.base import (
    Credit,
    Gains,
    GradedRollout,
    TrainedTokens,
    clipped,
    probability_ratio,
    rewards_of,
)


def advantages(group: Sequence[GradedRollout]) -> Sequence[Credit]:
    return rewards_of(group).tolist()


def loss(tokens: TrainedTokens, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2) -> Gains:
    return clipped(probability_ratio(tokens.logprobs, tokens.proximal), tokens.advantages, clip_low, clip_high)
