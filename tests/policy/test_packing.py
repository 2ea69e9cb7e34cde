"""The packing plan's promises, over random lengths and groups. About 3 s."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.errors import TrainingError
from titan_rl.policy import packing

BUDGET = 50
lengths_of_samples = st.lists(st.integers(1, BUDGET), max_size=60)
numbers_of_ranks = st.integers(1, 6)


def plan_packing(lengths, *, group_size=3, **kwargs):
    return packing.plan_packing(lengths, [index // group_size for index in range(len(lengths))], **kwargs)


@given(lengths_of_samples, numbers_of_ranks)
def test_every_sample_is_in_exactly_one_microbatch(lengths, ranks):
    plan = plan_packing(lengths, ranks=ranks, tokens_per_microbatch=BUDGET)
    placed = [index for rank in plan.microbatches for bin_ in rank for index in bin_]
    assert sorted(placed) == list(range(len(lengths)))


@given(lengths_of_samples, numbers_of_ranks)
def test_no_microbatch_is_over_the_budget(lengths, ranks):
    plan = plan_packing(lengths, ranks=ranks, tokens_per_microbatch=BUDGET)
    assert all(sum(lengths[i] for i in bin_) <= BUDGET for rank in plan.microbatches for bin_ in rank)


@given(lengths_of_samples, numbers_of_ranks)
def test_all_ranks_have_the_same_number_of_microbatches_and_none_is_idle_for_all(lengths, ranks):
    plan = plan_packing(lengths, ranks=ranks, tokens_per_microbatch=BUDGET)
    assert len(plan.microbatches) == ranks
    assert {len(rank) for rank in plan.microbatches} == {plan.rounds}
    if lengths:
        assert all(any(rank[number] for rank in plan.microbatches) for number in range(plan.rounds))


@given(lengths_of_samples, numbers_of_ranks)
def test_ranks_differ_by_less_than_the_longest_sample(lengths, ranks):
    plan = plan_packing(lengths, ranks=ranks, tokens_per_microbatch=BUDGET)
    loads = [sum(lengths[i] for bin_ in rank for i in bin_) for rank in plan.microbatches]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(lengths_of_samples, numbers_of_ranks, st.integers(1, 20))
def test_samples_of_a_group_are_neighbours_in_a_microbatch(lengths, ranks, group_size):
    plan = plan_packing(lengths, group_size=group_size, ranks=ranks, tokens_per_microbatch=BUDGET)
    for bin_ in (bin_ for rank in plan.microbatches for bin_ in rank):
        groups = [group for group, _ in groupby(index // group_size for index in bin_)]
        assert len(groups) == len(set(groups)) and list(bin_) == sorted(bin_)


@given(lengths_of_samples, st.integers(1, 20))
def test_groups_cost_no_microbatch_more_than_first_fit_decreasing(lengths, group_size):
    plan = plan_packing(lengths, group_size=group_size, ranks=1, tokens_per_microbatch=BUDGET)
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = next((number for number, free in enumerate(room) if length <= free), None)
        if fits is None:
            room.append(BUDGET - length)
        else:
            room[fits] -= length
    assert plan.rounds <= max(1, len(room))


def test_a_group_is_divided_only_where_ranks_would_wait_or_the_budget_asks_for_it():
    whole = plan_packing([5] * 12, ranks=2, tokens_per_microbatch=BUDGET)
    assert whole.microbatches == (((0, 1, 2, 6, 7, 8),), ((3, 4, 5, 9, 10, 11),))
    between_ranks = plan_packing([5] * 3, ranks=2, tokens_per_microbatch=BUDGET)
    assert between_ranks.microbatches == (((0, 1),), ((2,),))
    between_rounds = plan_packing([20] * 6, ranks=1, tokens_per_microbatch=BUDGET)
    assert between_rounds.microbatches == (((0, 1), (2, 3), (4, 5)),)


@given(lengths_of_samples, numbers_of_ranks)
def test_imbalance_is_one_at_best_and_the_number_of_ranks_at_worst(lengths, ranks):
    plan = plan_packing(lengths, ranks=ranks, tokens_per_microbatch=BUDGET)
    assert 1 <= plan.imbalance <= ranks + 1e-9


def test_imbalance_counts_the_waiting():
    assert plan_packing([10, 10], ranks=2, tokens_per_microbatch=BUDGET).imbalance == 1
    assert plan_packing([10], ranks=2, tokens_per_microbatch=BUDGET).imbalance == 2
    assert plan_packing([30, 10], ranks=2, tokens_per_microbatch=BUDGET).imbalance == 1.5


def test_a_sample_over_the_budget_is_named():
    with pytest.raises(TrainingError, match="sample 1 has 51 tokens"):
        plan_packing([3, 51], ranks=1, tokens_per_microbatch=BUDGET)


def test_an_empty_sample_is_refused():
    with pytest.raises(TrainingError, match="sample 0 has 0 tokens"):
        plan_packing([0], ranks=1, tokens_per_microbatch=BUDGET)


@given(lengths_of_samples, numbers_of_ranks)
def test_a_share_is_a_ranks_part_of_the_plan_with_positions_of_its_own(lengths, ranks):
    plan = plan_packing(lengths, ranks=ranks, tokens_per_microbatch=BUDGET, trained_tokens=7)
    for rank in range(ranks):
        positions, share = plan.share(rank)
        own = tuple(tuple(positions[index] for index in microbatch) for microbatch in share.microbatches[rank])
        assert own == plan.microbatches[rank]
        assert not any(any(share.microbatches[other]) for other in range(ranks) if other != rank)
        assert (share.rounds, share.imbalance, share.share_of) == (plan.rounds, plan.imbalance, rank)
        totals = (len(lengths), sum(lengths), max(lengths, default=0), 7)
        assert (share.samples, share.tokens, share.longest, share.trained_tokens) == totals
