"""GDPO: each named score in deviations of its own, then added, so that none drowns the others. (arXiv:2601.05242)

When     a reward adds up several scores of different scale, and one of them decides every advantage.
Is       the sum over scores of weight * (s_i - mean s) / (std s + epsilon), eq. 4; the loss standardizes the sums over
         the step, eq. 6.
Is not   a weighting of rewards before they are compared, as the rubric's weights are.
Differs  the scores are those that `scores` names, with their weights; without any, all scores of the rubric count 1.
Run      --rollout.advantage.name gdpo --trainer.loss.name reinforce_pp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from titan_rl.bounds import NotNegative
from titan_rl.policy.algorithms.base import Credit, GradedRollout, standardized


def advantages(
    group: Sequence[GradedRollout], *, scores: Mapping[str, float] | None = None, epsilon: NotNegative = 1e-4
) -> Sequence[Credit]:
    weights = scores or {name: 1.0 for rollout in group for name in rollout.parts}
    total = np.zeros(len(group))
    if absent := weights.keys() - {name for rollout in group for name in rollout.parts}:
        raise ValueError(f"no rollout has a score {', '.join(sorted(absent))}")
    for name, weight in weights.items():
        total += weight * standardized(np.array([rollout.parts.get(name, 0.0) for rollout in group]), epsilon)
    return total.tolist()
