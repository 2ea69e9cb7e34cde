"""Estimators against oracles: subsets are enumerated, binomials summed, exact means compared (a second)."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.playing.evaluate import difference, mean, pass_at_k, share


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_one_that_passed(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(combinations(passed, k))
    exact = Fraction(sum(map(any, subsets)), len(subsets))  # so it has no bias, and grows with k
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(float(exact), abs=1e-15)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_what_has_no_pass_at_k_is_refused(samples, passed, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, passed, k)


@given(st.integers(1, 300), st.data())
def test_wilsons_interval_holds_exactly_the_rates_that_its_score_test_does_not_refuse(of, data):
    passed = data.draw(st.integers(0, of))
    estimate = share(passed, of)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1

    def score(rate):
        return abs(passed / of - rate) / math.sqrt(rate * (1 - rate) / of)

    for bound in (estimate.low, estimate.high):
        if 1e-9 < bound < 1 - 1e-9:
            assert score(bound) == pytest.approx(1.96, abs=1e-3)


def test_wilsons_interval_is_that_of_the_literature():
    low, high = share(81, 263)[1:]  # R. G. Newcombe 1998, table I
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert [round(bound, 4) for bound in share(0, 20)] == [0, 0, 0.1611]


@settings(max_examples=20)  # each draws ten thousand means
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_a_bootstrap_is_the_same_again_and_holds_its_mean(values):
    estimate = mean(values)
    assert estimate == mean(values)
    assert min(values) - 1e-9 <= estimate.low <= estimate.high <= max(values) + 1e-9
    assert estimate.value == pytest.approx(math.fsum(values) / len(values), abs=1e-9)


def test_a_bootstrap_of_many_prompts_is_as_wide_as_the_normal_distribution_says():
    values = [float(number % 2) for number in range(1000)]
    estimate = mean(values)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(1000), rel=0.05)


def test_a_paired_difference_drops_what_is_hard_about_a_prompt():
    first = {prompt: float(prompt % 7) for prompt in range(100)}
    second = {prompt: value + 0.5 for prompt, value in first.items()} | {200: 99.0}
    assert difference(first, second) == pytest.approx((0.5, 0.5, 0.5))
    assert difference(first, {300: 1.0}) is None
