"""REINFORCE++: rewards as they are, standardized over the whole step instead of their group. (arXiv:2501.03262)

When     groups are small, or prompts differ so much that a group's own deviation misleads.
Is       A = (R - mean over the step) / std over the step, over all trained tokens, eq. 5; PPO's clip, eq. 1.
Is not   a comparison within the group: the prompt's difficulty stays in the advantage (see `reinforce_pp_baseline`).
Differs  the KL penalty of its return, eq. 4, is `trainer.kl.in_reward`, no part of mean or deviation; 1e-8 is added to
         that.
Run      --rollout.advantage.name reinforce_pp --trainer.loss.name reinforce_pp
"""

from collections.abc import Sequence

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms.base import Credit, Gains, GradedRollout, TrainedTokens, clipped, rewards_of


def advantages(group: Sequence[GradedRollout]) -> Sequence[Credit]:
    return rewards_of(group).tolist()


def loss(tokens: TrainedTokens, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2) -> Gains:
    spread = tokens.advantage_std + 1e-8  # 0 where all are equal, and then so is the difference
    return clipped(tokens.ratio, (tokens.advantages - tokens.advantage_mean) / spread, clip_low, clip_high)
