"""Discounted credit: of a reward that the last turn earned, earlier turns get less. (arXiv:1506.02438, eq. 4)

When     rollouts have many turns and the last ones decide.
Is       gamma^(turns left) * A_i, with GRPO's A_i: the return of a turn where only the last one is rewarded.
Is not   GAE: there is no value model whose errors would have to be smoothed.
Differs  turns are discounted, not tokens, so that a long answer is not worth less than a short one.
Run      --rollout.advantage.name discounted --rollout.advantage.kwargs.gamma 0.9
"""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms.base import Credit, GradedRollout, rewards_of, standardized


def advantages(group: Sequence[GradedRollout], *, gamma: Share = 0.95, epsilon: NotNegative = 1e-4) -> Sequence[Credit]:
    return [
        [gamma**left * advantage for left in reversed(range(len(rollout.turns)))]
        for rollout, advantage in zip(group, standardized(rewards_of(group), epsilon).tolist(), strict=True)
    ]
