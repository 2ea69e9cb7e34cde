"""Role-conditioned advantage estimation: each player of a game is compared with itself. (arXiv:2506.24119)

When     one policy plays several roles whose rewards differ, as the two players of a game.
Is       A = R_p - b_p for all turns of role p, with its reward R_p and a baseline b_p of its own, eq. 2 and 3.
Is not   divided by a deviation, as GRPO's are, which are given by role as well.
Differs  b_p is the mean of R_p in the group. Theirs is a moving average over all steps, b <- 0.95 b + 0.05 R, which
         workers would have to share; of rollouts that begin alike, as with one deal of cards, the mean varies less.
Run      --rollout.advantage.name rae
"""

from collections.abc import Sequence

from titan_rl.policy.algorithms import dr_grpo
from titan_rl.policy.algorithms.base import Credit, GradedRollout, credit_by_role


def advantages(group: Sequence[GradedRollout]) -> Sequence[Credit]:
    return credit_by_role(group, dr_grpo.advantages)
