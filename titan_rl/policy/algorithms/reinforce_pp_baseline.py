"""REINFORCE++ with a baseline: the group's mean is taken off, the step's deviation divides. (arXiv:2501.03262)

When     rewards of prompts are on different levels, and groups too small for a deviation of their own.
Is       A_i = r_i - mean r of the group, eq. 6, standardized over the step by the loss, eq. 7.
Is not   GRPO: an easy prompt's small differences are not blown up to the size of a hard one's.
Differs  not from the equations; the k2 term of eq. 8 is `trainer.kl` with estimator "k2".
Run      --rollout.advantage.name reinforce_pp_baseline --trainer.loss.name reinforce_pp
"""

from collections.abc import Sequence

from titan_rl.policy.algorithms import dr_grpo
from titan_rl.policy.algorithms.base import Credit, GradedRollout


def advantages(group: Sequence[GradedRollout]) -> Sequence[Credit]:
    return dr_grpo.advantages(group)
