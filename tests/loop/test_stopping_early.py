"""A run that has nothing left to learn ends well: what it knows is published, evaluated, and said."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_system import World, rollout, settle

from titan_rl.errors import NothingToTrain, SamplesLost

SENTENCE = (
    r"^task failures: 38 of the last 64 rollouts \(59%\), more than rollout.failure_share = 0.5; 38 × the task raised; "
    "correct the task"
)


def learned_after(groups: int):
    return lambda request: (0.0, 1.0) if request.group_id < groups else (1.0, 1.0)


async def test_a_run_that_has_learned_everything_evaluates_what_it_knows_and_says_why():
    world = World(steps=1000, groups=2, untrainable_batches=2)
    world.rollouts.outcome = learned_after(6)
    summary = await world.run()
    assert 3 <= summary.steps < 10
    assert summary.evaluations[-1].version.step == world.trainer.step == summary.steps
    assert summary.stopped_early.startswith(f"nothing is left to learn after step {summary.steps}: the last 4 groups")
    assert "4 solved (first group 6: all 2 rollouts got 1)" in summary.stopped_early
    assert summary.stopped_early in world.printed
    assert world.rollouts.owned == {}


async def test_equal_and_poor_rewards_are_a_failure():
    world = World(steps=1000, groups=2, untrainable_batches=2)
    world.rollouts.outcome = lambda request: (0.5, 0.5)
    with pytest.raises(NothingToTrain, match="4 all rewards equal .first group 0: all 2 rollouts got 0.5"):
        await world.run()


async def test_a_run_whose_rollouts_fail_too_often_stops_with_the_cause():
    world = World(steps=1000, groups=2)
    world.rollouts.outcome = lambda request: () if request.group_id % 4 else (0.0, 1.0)
    with pytest.raises(NothingToTrain, match=SENTENCE):
        await world.run()
    assert world.rollouts.owned == {} and world.trainer.step > 0


async def test_held_out_rollouts_that_fail_stop_no_run():
    world = World(steps=80, every=1)
    world.system.config.rollout.failure_share = 0.0
    world.rollouts.evaluation = (rollout(0, 1.0), rollout(0, 0.0, "boom"))
    summary = await world.run()
    assert summary.steps == 80 and sum(each.failed for each in summary.evaluations) == 81


async def test_samples_that_are_lost_under_the_last_step_are_played_again():
    world = World(steps=1000, groups=2, staleness=2, untrainable_batches=1)
    world.rollouts.outcome = learned_after(4)
    world.script.holds = lambda gate: gate in ("train 2", "play 4", "play 5")
    world.script.errors["train 2"] = [SamplesLost("store0 is gone", (3,))]
    async with world.running() as run:
        await world.script.open("play 4", "play 5")
        assert world.loop.summary.stopped_early.startswith("nothing is left to learn after step 2")
        world.script.holds = lambda gate: False
        await world.script.open("train 2")
        summary = await run
    assert summary.steps == 2 == summary.evaluations[-1].version.step
    assert world.trainer.batches[-1] == [2, 3]
    assert world.rollouts.owned == {}


@settings(max_examples=60, deadline=None)
@given(
    staleness=st.integers(0, 2),
    window=st.integers(1, 3),
    every=st.integers(0, 3),
    learned=st.integers(0, 12),
    batches=st.integers(1, 3),
    max_live=st.integers(2, 3),
    filter=st.sampled_from(["", "no_variance"]),
    held=st.sampled_from(["train 2", "publish v1", "pull v2", "evaluate v0", "evaluate v2", "play 5", ""]),
)
async def test_it_ends_whatever_is_under_way(staleness, window, every, learned, batches, max_live, filter, held):
    world = World(
        steps=1000,
        groups=2,
        staleness=staleness,
        window=window,
        every=every,
        max_live=max_live,
        filter=filter,
        untrainable_batches=batches,
    )
    world.rollouts.outcome = learned_after(learned)
    world.script.holds = lambda gate: gate == held
    async with world.running() as run:
        await settle()
        world.script.holds = lambda gate: False
        while world.script.held:
            await world.script.open(*world.script.held)
        await settle()
        assert run.done()
        summary = await run
    assert summary.stopped_early
    assert summary.evaluations[-1].version.step == world.trainer.step
    steps = [evaluation.version.step for evaluation in summary.evaluations]
    assert steps == sorted(set(steps))
    assert world.rollouts.owned == {}
    assert [version.step for version in world.trainer.live] == [world.trainer.step]
