"""Group advantages (0.5 s)."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.environments.rubric import LARGEST_REWARD
from titan_rl.rollout.samples import group_advantages

rewards = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=16)


def test_worked_example():
    # mean 0.25, unbiased deviation 0.5
    assert group_advantages([1.0, 0.0, 0.0, 0.0], epsilon=0.0).tolist() == [1.5, -0.5, -0.5, -0.5]


@settings(deadline=None)  # the machine may be busy
@given(rewards)
def test_advantages_are_deviations_from_the_mean_in_unbiased_deviations(values):
    advantages = group_advantages(values, epsilon=1e-4)
    if len(set(values)) == 1:
        assert not advantages.any()
        return
    scale = statistics.stdev(values) + 1e-4
    expected = [(value - statistics.fmean(values)) / scale for value in values]
    assert advantages == pytest.approx(expected, abs=1e-6)


@settings(deadline=None)  # the machine may be busy
@given(st.floats(-1e6, 1e6), st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(value, count):
    assert group_advantages([value] * count).tolist() == [0.0] * count


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.one_of(st.floats(-LARGEST_REWARD, LARGEST_REWARD), st.floats(-1, 1)), min_size=2, max_size=16),
    st.sampled_from([0.0, 1e-4]),
)
def test_every_reward_that_a_rubric_lets_pass_gives_a_finite_advantage(values, epsilon):
    advantages = group_advantages(values, epsilon)
    assert (abs(advantages) <= len(values)).all()


def test_no_rewards_give_no_advantages():
    assert np.array_equal(group_advantages([]), np.zeros(0))
