"""DAPO: a wider clip upwards, all tokens alike, and a softly punished length. (arXiv:2503.14476)

When     entropy falls too fast under GRPO, or answers grow into the limit.
Is       eq. 8 with clip_low 0.2 and clip_high 0.28; the soft overlong punishment of eq. 13, a reward that falls
         linearly from 0 at `longest - cache` sampled tokens to -1 at `longest`.
Is not   dynamic sampling by itself: that is `loop.filter = "no_variance"`, with any algorithm.
Differs  the punishment counts the tokens of all turns of a rollout; `longest` 0, the default, punishes none.
Run      --rollout.advantage.name dapo --rollout.advantage.kwargs.longest 512 --trainer.loss.name dapo
"""

from collections.abc import Sequence

import numpy as np

from titan_rl.bounds import Count, CountOrZero, NotNegative, Share
from titan_rl.policy.algorithms import grpo
from titan_rl.policy.algorithms.base import Credit, Gains, GradedRollout, TrainedTokens, rewards_of, standardized


def advantages(
    group: Sequence[GradedRollout], *, longest: CountOrZero = 0, cache: Count = 64, epsilon: NotNegative = 1e-4
) -> Sequence[Credit]:
    rewards = rewards_of(group)
    if longest:
        over = np.array([rollout.tokens for rollout in group]) - (longest - cache)
        rewards -= np.clip(over / cache, 0.0, 1.0)
    return standardized(rewards, epsilon).tolist()


def loss(tokens: TrainedTokens, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.28) -> Gains:
    return grpo.loss(tokens, clip_low=clip_low, clip_high=clip_high)
