"""MaxRL: rewards divided by the group's mean, so that a rare success counts as much as it is rare. (arXiv:2602.02710)

When     rewards are right or wrong and most prompts are hard: hard prompts get the gradient of maximum likelihood.
Is       A_i = (r_i - mean r) / mean r, eq. 10; 0 where nobody succeeded, as in algorithm 1.
Is not   for rewards below 0, whose mean says nothing about success; a group whose mean is not above 0 gets 0.
Differs  not from the estimator for one group; epsilon is added to the mean.
Run      --rollout.advantage.name maxrl --trainer.loss.name reinforce
"""

from collections.abc import Sequence

from titan_rl.bounds import NotNegative
from titan_rl.policy.algorithms.base import Credit, GradedRollout, above_mean, rewards_of


def advantages(group: Sequence[GradedRollout], *, epsilon: NotNegative = 1e-6) -> Sequence[Credit]:
    rewards = rewards_of(group)
    mean = rewards.mean()
    return (above_mean(rewards) / (mean + epsilon) if mean > 0 else 0 * rewards).tolist()
