"""Pass@k training: a group is rewarded for one success in k tries, and its rollouts share that. (arXiv:2508.10751)

When     the policy is to keep finding different answers, for search or later training; pass@1 rises more slowly.
Is       with N rollouts, W of them wrong, the mean R = 1 - C(W, k) / C(N, k) and the deviation s = sqrt(R (1 - R)):
         a right one gets (1 - R) / s, a wrong one (1 - R - C(W - 1, k - 1) / C(N - 1, k - 1)) / s, eq. 10 to 15.
Is not   for graded rewards: a rollout is right if its reward is at least `success`, and wrong otherwise.
Differs  not from the analytical form. Of fewer rollouts than k, k is their number.
Run      --rollout.advantage.name pass_at_k --rollout.advantage.kwargs.k 4
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

from titan_rl.bounds import Count
from titan_rl.policy.algorithms.base import Credit, GradedRollout


def advantages(group: Sequence[GradedRollout], *, k: Count = 4, success: float = 1.0) -> Sequence[Credit]:
    n, k = len(group), min(k, len(group))
    right = [rollout.reward >= success for rollout in group]
    wrong = n - sum(right)
    mean = 1 - comb(wrong, k) / comb(n, k)
    if not 0 < mean < 1:
        return [0.0] * n
    deviation = sqrt(mean * (1 - mean))
    lost = 1 - mean - (comb(wrong - 1, k - 1) / comb(n - 1, k - 1) if wrong else 0.0)
    return [(1 - mean if each else lost) / deviation for each in right]
