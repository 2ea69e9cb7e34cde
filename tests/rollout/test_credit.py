"""What a function of one's own may give as credit, and how it is told what is wrong (1 s)."""

import numpy as np
import pytest

from titan_rl.policy.algorithms.base import GradedRollout, GradedTurn, credit_per_turn


def group_of(*rollouts: tuple[int, ...]) -> list[GradedRollout]:
    """Rollouts whose turns have so many tokens."""
    prompt = np.zeros(1, np.int32)
    return [
        GradedRollout(reward=1.0, parts={}, turns=tuple(GradedTurn(tokens=each, prompt=prompt) for each in turns))
        for turns in rollouts
    ]


@pytest.mark.parametrize(
    ("credit", "found"),
    [
        ([1, np.float32(2.0)], [[1.0, 1.0], [2.0]]),
        (np.array([1.0, 2.0]), [[1.0, 1.0], [2.0]]),
        ([np.array(1.0), [2.0]], [[1.0, 1.0], [2.0]]),
        ([[0.5, -0.5], 0], [[0.5, -0.5], [0.0]]),
        ([[0.5, np.array([1.0, 2.0, 3.0])], [[4.0]]], [[0.5, [1.0, 2.0, 3.0]], [[4.0]]]),
    ],
)
def test_credit_is_a_number_or_one_for_each_turn_or_for_each_token_of_a_turn(credit, found):
    turns = credit_per_turn(group_of((2, 3), (1,)), credit)
    assert [[each if isinstance(each, float) else each.tolist() for each in rollout] for rollout in turns] == found


@pytest.mark.parametrize(
    ("credit", "sentence"),
    [
        ([1.0], "1 advantages for 2 rollouts"),
        ([[1.0], 2.0], "rollout 0: 1 advantages for 2 turns"),
        ([1.0, [[1.0, 2.0]]], "rollout 1, turn 0: 2 advantages for 1 tokens"),
        ([[1.0, [0.5]], 2.0], "rollout 0, turn 1: 1 advantages for 3 tokens"),
        ([1.0, float("nan")], "rollout 1, turn 0: an advantage is nan"),
        ([1e39, 1.0], "rollout 0, turn 0: an advantage is 1e\\+39"),
    ],
)
def test_credit_that_does_not_fit_is_named_with_its_place(credit, sentence):
    with pytest.raises(ValueError, match=sentence):
        credit_per_turn(group_of((2, 3), (1,)), credit)
