"""The packing plan's promises, over random lengths and groups. About 3 s."""

from __future__ import annotations

import asyncio
import statistics
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_of_lengths

from titan_rl.actors.trainer_client import TrainerClient
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TrainingError
from titan_rl.policy.config import TrainerConfig
from titan_rl.types import TrainingSample

BUDGET = 50
lengths_of_samples = st.lists(st.integers(1, BUDGET), max_size=60)
numbers_of_ranks = st.integers(1, 6)


@given(lengths_of_samples, numbers_of_ranks, st.integers(1, 20))
def test_a_plan_keeps_its_promises(lengths, ranks, group_size):
    plan = plan_of_lengths(lengths, group_size=group_size, ranks=ranks, budget=BUDGET)
    assert len(plan.microbatches) == ranks
    assert {len(rank) for rank in plan.microbatches} == {plan.rounds}
    if lengths:
        assert all(any(rank[number] for rank in plan.microbatches) for number in range(plan.rounds)), "all are idle"
    microbatches = [microbatch for rank in plan.microbatches for microbatch in rank]
    assert sorted(index for microbatch in microbatches for index in microbatch) == list(range(len(lengths)))
    for microbatch in microbatches:
        assert sum(lengths[index] for index in microbatch) <= BUDGET
        groups = [group for group, _ in groupby(index // group_size for index in microbatch)]
        assert len(groups) == len(set(groups)) and list(microbatch) == sorted(microbatch), "a group is together"
    loads = [sum(lengths[index] for microbatch in rank for index in microbatch) for rank in plan.microbatches]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert 1 <= plan.imbalance <= ranks + 1e-9


@given(lengths_of_samples, st.integers(1, 20))
def test_groups_cost_no_microbatch_more_than_first_fit_decreasing(lengths, group_size):
    plan = plan_of_lengths(lengths, group_size=group_size, ranks=1, budget=BUDGET)
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = next((number for number, free in enumerate(room) if length <= free), None)
        if fits is None:
            room.append(BUDGET - length)
        else:
            room[fits] -= length
    assert plan.rounds <= max(1, len(room))


def test_a_group_is_divided_only_where_ranks_would_wait_or_the_budget_asks_for_it():
    whole = plan_of_lengths([5] * 12, ranks=2, budget=BUDGET)
    assert whole.microbatches == (((0, 1, 2, 6, 7, 8),), ((3, 4, 5, 9, 10, 11),))
    between_ranks = plan_of_lengths([5] * 3, ranks=2, budget=BUDGET)
    assert between_ranks.microbatches == (((0, 1),), ((2,),))
    between_rounds = plan_of_lengths([20] * 6, ranks=1, budget=BUDGET)
    assert between_rounds.microbatches == (((0, 1), (2, 3), (4, 5)),)


def test_imbalance_counts_the_waiting():
    assert plan_of_lengths([10, 10], ranks=2, budget=BUDGET).imbalance == 1
    assert plan_of_lengths([10], ranks=2, budget=BUDGET).imbalance == 2
    assert plan_of_lengths([30, 10], ranks=2, budget=BUDGET).imbalance == 1.5


@pytest.mark.parametrize("length", [51, 0])
def test_a_sample_over_the_budget_or_without_tokens_is_named(length):
    with pytest.raises(TrainingError, match=f"sample 1 has {length} tokens"):
        plan_of_lengths([3, length], ranks=1, budget=BUDGET)


@given(lengths_of_samples, numbers_of_ranks)
def test_a_share_is_a_ranks_part_of_the_plan_with_positions_of_its_own(lengths, ranks):
    plan = plan_of_lengths(lengths, ranks=ranks, budget=BUDGET)
    for rank in range(ranks):
        positions, share = plan.share(rank)
        own = tuple(tuple(positions[index] for index in microbatch) for microbatch in share.microbatches[rank])
        assert own == plan.microbatches[rank]
        assert not any(any(share.microbatches[other]) for other in range(ranks) if other != rank)
        assert (share.rounds, share.imbalance, share.share_of) == (plan.rounds, plan.imbalance, rank)
        totals = (len(lengths), sum(lengths), max(lengths, default=0), sum(lengths))
        assert (share.samples, share.tokens, share.longest, share.trained_tokens) == totals


def test_every_rank_of_a_run_is_told_the_mean_and_deviation_of_the_steps_advantages():
    """Over trained tokens; a loss that standardizes by the defaults, 0 and 1, would not standardize."""
    samples = [
        TrainingSample(
            group_id=number,
            sample=0,
            token_ids=np.zeros(length, np.int32),
            loss_mask=np.arange(length) >= 2,
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int64),
            advantages=np.full(length, number**2, np.float32),
            reward=0.0,
        )
        for number, length in enumerate([3, 7, 12, 30])
    ]
    tokens = [float(each) for sample in samples for each in sample.advantages[sample.loss_mask]]
    told = []

    class Rank:
        def call(self, seconds, endpoint, sequence, mine, plan):
            told.append(plan)

    async def call_all(call):
        return [call(0, 0), call(1, 0)]

    client = TrainerClient.__new__(TrainerClient)
    client._config, client._step_seconds = TrainerConfig(data_parallel=2), 1.0
    client.ranks, client._again = [Rank(), Rank()], call_all
    asyncio.run(client._step(None, SampleBatch.of(samples)))
    assert [plan.share_of for plan in told] == [0, 1]
    for plan in told:
        assert plan.trained_tokens == len(tokens)
        assert plan.advantage_mean == pytest.approx(statistics.fmean(tokens))
        assert plan.advantage_std == pytest.approx(statistics.pstdev(tokens))
