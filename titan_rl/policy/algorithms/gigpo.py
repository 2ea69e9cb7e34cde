"""GiGPO: besides whole rollouts, single turns are compared that were asked exactly the same. (arXiv:2505.10978)

When     rollouts of many turns pass through the same states, as in games, browsers and searches.
Is       A = A_rollout + weight * A_turn, eq. 8. A_rollout is GRPO's; A_turn is the discounted sum of
         rewards from the turn on, in deviations from those of the group's turns in the same state, eq. 7.
Is not   a value model; a state that only one turn was in gives that turn 0.
Differs  two states are the same if the policy saw the same tokens. What the rubric gives is earned in the last turn.
Run      --rollout.advantage.name gigpo
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms.base import Credit, GradedRollout, discounted_sums, rewards_of, standardized


def advantages(
    group: Sequence[GradedRollout], *, weight: NotNegative = 1.0, gamma: Share = 0.95, epsilon: NotNegative = 1e-4
) -> Sequence[Credit]:
    whole = standardized(rewards_of(group), epsilon)
    credit = [np.full(len(rollout.turns), each) for rollout, each in zip(group, whole, strict=True)]
    places = defaultdict(list)
    for number, rollout in enumerate(group):
        rewards = [each.reward for each in rollout.turns]
        rewards[-1:] = [each + rollout.grade for each in rewards[-1:]]
        for turn, (each, earned) in enumerate(zip(rollout.turns, discounted_sums(rewards, gamma), strict=True)):
            places[each.prompt.tobytes()].append((number, turn, earned))
    for same in places.values():
        for (number, turn, _), each in zip(same, standardized(np.array([r for *_, r in same]), epsilon), strict=True):
            credit[number][turn] += weight * each
    return [each.tolist() for each in credit]
