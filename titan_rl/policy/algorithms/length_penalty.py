"""Length reward of Kimi k1.5: among right answers the short ones get more. (arXiv:2501.12599)

When     answers grow without getting better.
Is       with x = 1/2 - (length - shortest) / (longest - shortest) of the group: r_i + weight * x for a right answer,
         r_i + weight * min(0, x) for a wrong one, section 2.3.3, whose equation has no number; then GRPO's advantages.
Is not   a limit: nothing is cut, and a group of equal lengths gets no such reward.
Differs  lengths are of all turns of a rollout together.
Run      --rollout.advantage.name length_penalty --rollout.advantage.kwargs.weight 0.2
"""

from collections.abc import Sequence

import numpy as np

from titan_rl.bounds import NotNegative
from titan_rl.policy.algorithms.base import Credit, GradedRollout, rewards_of, standardized


def advantages(
    group: Sequence[GradedRollout], *, weight: NotNegative = 0.2, success: float = 1.0, epsilon: NotNegative = 1e-4
) -> Sequence[Credit]:
    rewards, lengths = rewards_of(group), np.array([float(rollout.tokens) for rollout in group])
    if spread := np.ptp(lengths):
        shorter = 0.5 - (lengths - lengths.min()) / spread
        shorter[(rewards < success) & (shorter > 0)] = 0.0
        rewards += weight * shorter
    return standardized(rewards, epsilon).tolist()
