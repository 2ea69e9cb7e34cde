"""Group Relative Policy Optimization: rewards in deviations from their group, and PPO's clip. (arXiv:2402.03300)

When     nothing speaks for another: it is the default, and old samples cannot push far.
Is       A_i = (r_i - mean r) / (std r + epsilon), section 4.1.2; per token min(r A, clip(r, 1 - low, 1 + high) A),
         eq. 3, with r taken against the weights that SAMPLED the token, however old they are.
Is not   GRPO's KL term, which is `trainer.kl` with any loss.
Differs  every token weighs alike instead of every sample (DAPO, arXiv:2503.14476, eq. 8): `aggregation` "sample_mean"
         is the paper's. The deviation is the unbiased one.
Run      without any setting
"""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms.base import (
    Credit,
    Gains,
    GradedRollout,
    TrainedTokens,
    clipped,
    rewards_of,
    standardized,
)


def advantages(group: Sequence[GradedRollout], *, epsilon: NotNegative = 1e-4) -> Sequence[Credit]:
    return standardized(rewards_of(group), epsilon).tolist()


def loss(tokens: TrainedTokens, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2) -> Gains:
    return clipped(tokens.ratio, tokens.advantages, clip_low, clip_high)
