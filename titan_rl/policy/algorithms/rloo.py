"""REINFORCE leave-one-out: every rollout is compared with the mean of the others. (arXiv:2402.14740)

When     an unbiased baseline matters more than the scale of the advantages.
Is       A_i = r_i - mean of r_j over j != i, section 2.3: the estimator after eq. 8, which has no number.
Is not   divided by a deviation: with a leave-one-out baseline that explodes where the others are equal.
Differs  not from the equation. A rollout without siblings gets 0: it has nothing to be compared with.
Run      --rollout.advantage.name rloo --trainer.loss.name reinforce
"""

from collections.abc import Sequence

from titan_rl.policy.algorithms.base import Credit, GradedRollout, above_mean, rewards_of


def advantages(group: Sequence[GradedRollout]) -> Sequence[Credit]:
    rewards = rewards_of(group)
    others = len(rewards) - 1
    return (above_mean(rewards) * (len(rewards) / others) if others else 0 * rewards).tolist()
