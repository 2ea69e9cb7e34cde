"""GDPO: each named score in deviations of its own, then added, so that none drowns the others. (arXiv:2601.05242)

When     a reward adds up several scores of different scale, and one of them decides every advantage.
Is       the sum over scores of weight * (s_i - mean s) / (std s + epsilon), eq. 4; the loss standardizes the sums over
         the step, eq. 6.
Is not   a weighting of rewards before they are compared, as the rubric's weights are.
Differs  `scores` names them, with their weights; without any, the reward is the only one. A score that a rollout does
         not have is 0.
Run      --rollout.advantage.name gdpo --rollout.advantage.kwargs.scores.NAME WEIGHT --trainer.loss.name reinforce_pp
"""

from collections.abc import Mapping, Sequence

import numpy as np

from titan_rl.bounds import NotNegative
from titan_rl.policy.algorithms.base import Credit, GradedRollout, rewards_of, standardized


def advantages(
    group: Sequence[GradedRollout], *, scores: Mapping[str, float] | None = None, epsilon: NotNegative = 1e-4
) -> Sequence[Credit]:
    if not scores:
        return standardized(rewards_of(group), epsilon).tolist()
    if not any(name in rollout.parts for rollout in group for name in scores):
        raise ValueError(f"no rollout has a score {' or '.join(scores)}; there are {', '.join(group[0].parts)}")
    total = np.zeros(len(group))
    for name, weight in scores.items():
        total += weight * standardized(np.array([rollout.parts.get(name, 0.0) for rollout in group]), epsilon)
    return total.tolist()
