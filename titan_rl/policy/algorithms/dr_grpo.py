"""GRPO done right: no division by the group's deviation, none by an answer's length. (arXiv:2503.20783)

When     easy and hard prompts should weigh as their rewards say, and long wrong answers should not be spared.
Is       A_i = r_i - mean r, and the sum over an answer's tokens, section 3.2: eq. 3 without the two terms
         that GRPO divides by, which is PPO's eq. 2.
Is not   a new clip: the loss is GRPO's.
Differs  not from the equation; the authors' code divides by the longest length, which only scales the gradient.
Run      --rollout.advantage.name dr_grpo --trainer.loss.name dr_grpo
"""

from collections.abc import Sequence

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms import grpo
from titan_rl.policy.algorithms.base import Credit, Gains, GradedRollout, TrainedTokens, above_mean, rewards_of


def advantages(group: Sequence[GradedRollout]) -> Sequence[Credit]:
    return above_mean(rewards_of(group)).tolist()


def loss(tokens: TrainedTokens, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2) -> Gains:
    return grpo.loss(tokens, clip_low=clip_low, clip_high=clip_high)


loss.aggregation = "sample_sum"  # type: ignore[attr-defined]
