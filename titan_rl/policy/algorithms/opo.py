"""OPO: the baseline of least variance, in which long answers count more. (arXiv:2505.23585)

When     training is strictly on-policy (`loop.max_staleness` 0) and lengths differ much.
Is       A_i = r_i - b*, b* = sum of l_j r_j / sum of l_j with the lengths l in sampled tokens: the practical one of the
         paper's two optimal baselines.
Is not   leave-one-out, nor divided by a deviation.
Differs  lengths are of all turns of a rollout together.
Run      --rollout.advantage.name opo --trainer.loss.name reinforce
"""

from collections.abc import Sequence

import numpy as np

from titan_rl.policy.algorithms.base import Credit, GradedRollout, above_mean, rewards_of


def advantages(group: Sequence[GradedRollout]) -> Sequence[Credit]:
    return above_mean(rewards_of(group), np.array([rollout.tokens for rollout in group])).tolist()
