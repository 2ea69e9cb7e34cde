"""Discounted credit: of a reward that the last turn earned, earlier turns get less. (arXiv:1506.02438, eq. 4)

When     rollouts have many turns and the last ones decide, or the task gives rewards to turns.
Is       gamma^(turns left) * A_i, with GRPO's A_i of what the rubric gave, which the last turn earned; plus the
         discounted sum of the rewards of this turn and later ones, in deviations from the group's at the same turn.
Is not   GAE: there is no value model whose errors would have to be smoothed.
Differs  turns are discounted, not tokens, so that a long answer is not worth less than a short one. Both sums have
         deviations of their own, as in MT-GRPO (arXiv:2505.11821), so neither drowns the other.
Run      --rollout.advantage.name discounted --rollout.advantage.kwargs.gamma 0.9
"""

from collections.abc import Sequence

import numpy as np

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms.base import Credit, GradedRollout, discounted_sums, standardized


def advantages(group: Sequence[GradedRollout], *, gamma: Share = 0.95, epsilon: NotNegative = 1e-4) -> Sequence[Credit]:
    grades = standardized(np.array([rollout.grade for rollout in group]), epsilon)
    credit = [
        [gamma**left * grade for left in reversed(range(len(rollout.turns)))]
        for rollout, grade in zip(group, grades.tolist(), strict=True)
    ]
    sums = [discounted_sums([turn.reward for turn in rollout.turns], gamma) for rollout in group]
    for place in range(max(map(len, sums))):
        there = [number for number, each in enumerate(sums) if place < len(each)]
        compared = standardized(np.array([sums[number][place] for number in there]), epsilon)
        for number, each in zip(there, compared.tolist(), strict=True):
            credit[number][place] += each
    return credit
