"""Simulated runs keep the promises of real ones, and no run is faster than its busiest resource."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_examples import small

from titan_rl.errors import ConfigError
from titan_rl.planner.scenario import EngineSpeed, TrainerSpeed, read_lengths
from titan_rl.planner.simulation import Resource, simulate


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.sampled_from([*map(read_lengths, ("uniform:40:40", "uniform:1:100", "lognormal:40:1.2:500"))]),
    generators=st.integers(1, 5),
    p=st.integers(1, 6),
    samples=st.integers(1, 5),
    staleness=st.integers(0, 3),
    window=st.integers(1, 12),
    sync=st.sampled_from(["drain", "hot_swap"]),
    max_syncing=st.integers(0, 2),
    strategy=st.sampled_from(["least_loaded", "round_robin", "sticky_session"]),
    train=st.sampled_from([0.0, 0.3, 3.0]),
    overlap=st.booleans(),
    reward=st.sampled_from([0.0, 0.2]),
)
def test_no_run_is_faster_than_its_busiest_resource(
    lengths, generators, p, samples, staleness, window, sync, max_syncing, strategy, train, overlap, reward
):
    result = simulate(
        small(
            lengths=lengths,
            generators=generators,
            groups_per_step=p,
            samples_per_group=samples,
            max_staleness=staleness,
            window=window,
            weight_sync=sync,
            max_syncing=max_syncing,
            strategy=strategy,
            trainer=TrainerSpeed(seconds_per_step=train, seconds_per_publication=0.1, overlap_publication=overlap),
            group_seconds=reward,
        )
    )
    assert result.share_of_bound <= 1 + 1e-9
    assert sum(result.ages.values()) == p * 10
    assert max(result.ages) <= (staleness and staleness + -(-(window - 1) // p))
    assert 0 <= result.generators_busy <= 1 + 1e-9 and 0 <= result.trainer_busy <= 1 + 1e-9


def test_a_synchronous_run_takes_what_its_parts_take_in_turn():
    """Equal lengths: every step is 50 decode steps of 8 requests, half a second of training, publication and load."""
    engine = EngineSpeed(seconds_per_step=0.01, seconds_per_sequence=0.001, seconds_per_load=0.2)
    result = simulate(small(lengths=read_lengths("uniform:50:50"), engine=engine, steps=10))
    assert result.seconds == pytest.approx(10 * (50 * 0.018 + 0.5) + 9 * (0.1 + 0.2))
    assert result.ages == {0: 40}


def test_a_perfect_pipeline_reaches_the_bound_of_its_trainer():
    result = simulate(small(trainer=TrainerSpeed(seconds_per_step=20.0), max_staleness=1, window=8, steps=40))
    assert result.busiest is Resource.TRAINER
    assert result.share_of_bound > 0.99


def test_a_perfect_pipeline_reaches_the_bound_of_its_generators():
    """Equal lengths and always more requests than fit: every engine decodes 8 all the time."""
    result = simulate(
        small(
            lengths=read_lengths("uniform:50:50"),
            trainer=TrainerSpeed(seconds_per_step=0.01),
            max_staleness=3,
            window=16,
            steps=60,
        )
    )
    assert result.busiest is Resource.GENERATORS
    assert result.share_of_bound > 0.97


def test_too_few_slots_are_named_as_what_limits_a_run():
    result = simulate(small(generators=16, lengths=read_lengths("lognormal:60:1.5:2000"), steps=20))
    assert result.busiest is Resource.SLOTS


def test_the_same_scenario_gives_the_same_run():
    first, again = (simulate(small(max_staleness=2, window=6, generators=3)) for _ in range(2))
    assert first.seconds == again.seconds and first.ages == again.ages


def test_lengths_are_a_function_of_seed_and_group():
    lengths = read_lengths("lognormal:100:1:500", seed=5)
    assert [lengths(i, 4) for i in (3, 1)] == [lengths(i, 4) for i in (1, 3)][::-1]


def test_lengths_can_be_read_from_a_file(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("10\n20\n30\n")
    assert {length for group in range(50) for length in read_lengths(f"file:{file}")(group, 4)} == {10, 20, 30}


@pytest.mark.parametrize("text", ["", "ten\n", "5\n0\n"])
def test_a_file_that_holds_no_lengths_is_a_wrong_config(tmp_path, text):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_lengths(f"file:{file}")
