"""What the training loop does when, step by step, over scripted parts."""

import asyncio
import random
import re
from dataclasses import replace

import pytest
from msgspec import structs
from scripted_system import World, holding, plays, settle

from titan_rl.errors import ActorFailed, InvariantError, SamplesLost, TaskError, TrainingError, WeightsError
from titan_rl.types import Purpose


async def finish(world: World) -> None:
    """The rest of the run, nothing held any more."""
    world.script.holds = lambda gate: False
    while world.script.held:
        await world.script.open(*world.script.held)


async def test_at_staleness_0_no_group_starts_before_the_version_of_the_step_before_is_served():
    world = World(steps=4, groups=3)
    summary = await world.run()
    for step in range(1, 4):
        first = min(world.script.at(play) for play in plays(range(3 * step, 3 * step + 3)))
        assert world.script.at(f"pull v{step} done") < first
    assert summary.steps == 4
    assert set(summary.ages) == {0}
    assert world.trainer.batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


async def test_at_staleness_2_three_batches_are_in_flight_and_a_slot_is_free_when_its_version_is_served():
    world = World(steps=6, groups=2, staleness=2)
    world.script.holds = holding("play", "pull")
    async with world.running() as run:
        await world.script.open("pull v0")
        assert world.playing == [0, 1, 2, 3, 4, 5]
        await world.script.open("play 0", "play 1")
        assert world.trainer.step == 1
        assert world.playing == [2, 3, 4, 5]
        await world.script.open("pull v1")
        assert world.playing == [2, 3, 4, 5, 6, 7]
        await finish(world)
        summary = await run
    assert max(summary.ages) <= 2


async def test_weights_that_were_published_before_the_news_of_their_step_arrived_are_pulled_after_it():
    world = World(steps=3, staleness=2)
    world.script.holds = lambda gate: gate in ("train 2", "publish v1", "news of 2")
    async with world.running() as run:
        await world.script.open("train 2", "publish v1")
        assert world.trainer.live == [(0, 0), (0, 2)]
        assert "pull v2" not in world.script.events
        await world.script.open("news of 2")
        assert "pull v2 done" in world.script.events
        await finish(world)
        await run


# --- evaluation ------------------------------------------------------------------------------------------------------


async def test_one_generator_takes_no_newer_version_until_the_evaluation_is_over():
    world = World(steps=2, every=1)
    world.router.one_generator = True
    world.script.holds = holding("evaluate")
    async with world.running() as run:
        assert world.trainer.step == 1 and world.router.serving == (0, 0)
        await world.script.open("evaluate v0")
        assert world.router.serving == (0, 1)
        await finish(world)
        await run
    assert world.rollouts.evaluated == [(0, step) for step in range(3)]


# --- groups that cannot be trained -----------------------------------------------------------------------------------


async def test_a_group_whose_samples_were_lost_is_played_again_and_the_others_of_its_batch_are_kept():
    world = World(steps=2, groups=3)
    world.script.errors["train 1"] = [SamplesLost("gone", (1,))]
    await world.run()
    asked = [(request.group_id, request.attempt) for request in world.rollouts.started]
    assert asked == [(0, 0), (1, 0), (2, 0), (1, 1), (3, 0), (4, 0), (5, 0)]
    assert world.trainer.batches[0] == [0, 1, 2]
    assert world.rollouts.released == 2 * len(asked)
    assert world.rollouts.owned == {}


async def test_a_group_that_is_lost_again_and_again_ends_the_run():
    world = World(steps=1)
    world.script.errors["train 1"] = [SamplesLost("gone for good", (0,)) for _ in range(9)]
    with pytest.raises(SamplesLost, match="gone for good"):
        await world.run()
    assert world.rollouts.started[-1].attempt == 3


@pytest.mark.parametrize("groups", [(), (77,)])
async def test_a_loss_that_names_no_group_of_the_batch_ends_the_run(groups):
    world = World(steps=1)
    error = SamplesLost("of what?", groups)
    world.script.errors["train 1"] = [error]
    with pytest.raises(SamplesLost) as caught:
        await world.run()
    assert caught.value is error


async def test_filtered_and_failed_groups_are_replaced_and_their_samples_released():
    world = World(steps=2, groups=2, filter="no_variance")
    world.rollouts.outcome = lambda request: {0: (1.0, 1.0), 1: (), 4: (0.0, 0.0)}.get(request.group_id, (0.0, 1.0))
    await world.run()
    assert world.trainer.batches == [[2, 3], [5, 6]]
    assert world.rollouts.owned == {}
    assert world.metrics.written[-2][1]["groups/filtered"] == 2
    assert world.metrics.written[-2][1]["groups/failed"] == 1


async def test_lengths_are_told_of_all_that_was_sampled_and_of_what_was_trained(monkeypatch):
    world = World(steps=1, groups=2, filter="no_variance")
    world.rollouts.outcome = lambda request: {0: (1.0, 1.0), 1: ()}.get(request.group_id, (0.0, 1.0))
    play = world.rollouts.run_group

    async def longer(request):
        report = await play(request)
        tokens = {0: 40, 1: 20}.get(request.group_id, 10)  # filtered, failed, trained
        return replace(report, rollouts=tuple(structs.replace(each, sampled_tokens=tokens) for each in report.rollouts))

    monkeypatch.setattr(world.rollouts, "run_group", longer)
    await world.run()
    (numbers,) = (numbers for _, numbers in world.metrics.written if "train/loss" in numbers)
    sampled = [40, 40, 20, 10, 10, 10, 10]
    assert numbers["rollout/length_mean"] == sum(sampled) / len(sampled) and numbers["rollout/length_max"] == 40
    assert (numbers["rollout/length_p50"], numbers["rollout/length_p95"]) == (10, 40)
    assert {numbers[f"rollout/trained_length_{which}"] for which in ("mean", "p50", "p95")} == {10}
    assert numbers["rollout/failed_task"] == 1 / 5 and numbers["rollout/failed_tool"] == 0


async def test_a_filter_never_sees_a_group_without_samples(tmp_path):
    (tmp_path / "strict.py").write_text("def first(report):\n    return str(report.samples.refs[0].reward > 1 or '')\n")
    world = World(steps=1, groups=2, filter=f"{tmp_path}/strict.py:first")
    world.rollouts.outcome = lambda request: () if request.group_id == 0 else (0.0, 1.0)
    await world.run()
    assert world.trainer.batches == [[1, 2]]


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "error"),
    [
        ("play 3", ActorFailed("rollout worker 0 is gone")),
        ("train 2", TrainingError("NaN")),
        ("publish v0", WeightsError("no room")),
        ("publish v1", WeightsError("no room")),
        ("pull v1", ActorFailed("router.pull_model_state_dict: no answer")),
        ("free v0", WeightsError("not live")),
        ("evaluate v0", TaskError("1 of 2 held-out rollouts failed")),
        ("freeze", WeightsError("not what was published")),
    ],
)
async def test_a_failure_in_any_task_ends_the_run_with_that_error_and_the_others_with_it(gate, error):
    world = World(steps=4, groups=2, staleness=1, every=1, max_live=3)
    world.script.errors[gate] = [error]
    others = asyncio.all_tasks()
    with pytest.raises(type(error)) as caught:
        await world.run()
    assert caught.value is error
    assert asyncio.all_tasks() == others
    assert world.rollouts.owned == {}


async def test_a_failure_cancels_what_is_under_way():
    world = World(steps=4, groups=2, staleness=2)
    world.script.holds = holding("play", "evaluate", "train")
    async with world.running() as run:
        await world.script.open("play 0", "play 1")
        assert sorted(world.script.held) == sorted([*plays(range(2, 6)), "evaluate v0", "train 1"])
        world.script.errors["train 1"] = [TrainingError("inf")]
        await world.script.open("train 1")
        with pytest.raises(TrainingError, match="inf"):
            await run
    assert sorted(world.script.cancelled) == sorted([*plays(range(2, 6)), "evaluate v0"])


async def test_a_run_that_is_stopped_holds_no_samples():
    world = World(steps=4, groups=2, staleness=2)
    world.script.holds = holding("play", "train")
    async with world.running() as run:
        await world.script.open("play 0", "play 1", "play 2")
        assert len(world.rollouts.owned) == 6
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert world.rollouts.owned == {}


async def test_an_environment_without_held_out_prompts_ends_the_run_at_once():
    world = World()
    world.rollouts.held_out = 0
    with pytest.raises(TaskError, match="copy gave no held-out prompts"):
        await world.run()
    assert world.trainer.step == 0


async def test_a_generator_that_does_not_take_new_weights_is_named_once_while_the_reason_is_the_same():
    world = World(steps=2)
    world.router.failures = {"generator0": "fingerprints differ"}
    await world.run()
    assert world.printed.count("does not serve") == world.printed.count("does not serve v0: fingerprints differ") == 1


async def test_a_filter_that_raises_ends_the_run_with_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("def first(report):\n    raise KeyError('score')\n")
    world = World(filter=f"{tmp_path}/broken.py:first")
    with pytest.raises(TaskError, match=r"broken.py:first raised KeyError: 'score'"):
        await world.run()


async def test_samples_that_are_still_held_at_the_end_are_an_error_that_names_them():
    world = World(steps=1)
    world.rollouts.owned[99] = 7
    with pytest.raises(InvariantError, match="store0: 1 samples of group 7, 64 bytes"):
        await world.run()


# --- warm-up ---------------------------------------------------------------------------------------------------------


async def test_warm_up_comes_before_the_first_version_and_releases_every_demonstration():
    world = World(steps=1, warmup=3)
    await world.run()
    assert world.script.at("warm up 2 done") < world.script.at("freeze") < world.script.at("publish v0")
    assert [request.group_id for request in world.rollouts.started if request.purpose == "demonstrate"] == [0, 1, 2]
    assert world.rollouts.owned == {}


async def test_a_warm_up_that_has_learned_enough_ends_and_holds_no_demonstrations():
    world = World(steps=1, warmup=30, enough_loss=10.0)
    await world.run()
    assert len([event for event in world.script.events if re.fullmatch(r"warm up \d+", event)]) == 10
    assert world.rollouts.owned == {}


@pytest.mark.parametrize("enough", [0.0, 1e-9])
async def test_a_warm_up_that_does_not_come_to_the_wanted_loss_asks_why(enough):
    world = World(steps=1, warmup=12, enough_loss=enough)
    await world.run()
    assert "warm-up step 12/12" in world.printed
    assert ("1e-09 was wanted. Do prompts say" in world.printed) == (enough > 0)


@pytest.mark.parametrize("ahead_is_ready", [True, False])
async def test_a_warm_up_that_fails_holds_no_demonstrations(ahead_is_ready):
    world = World(steps=1, warmup=3)
    error = TrainingError("NaN")
    world.script.errors["warm up 0"] = [error]
    world.script.holds = holding("warm") if ahead_is_ready else holding("warm", "demonstrate")
    others = asyncio.all_tasks()
    run = asyncio.create_task(world.run())
    await settle()
    if not ahead_is_ready:
        await world.script.open("demonstrate 0")
    assert len(world.rollouts.owned) == (4 if ahead_is_ready else 2)
    await world.script.open("warm up 0")
    assert world.script.cancelled == ([] if ahead_is_ready else ["demonstrate 1"])
    with pytest.raises(TrainingError) as caught:
        await run
    assert caught.value is error
    assert world.rollouts.owned == {}
    assert asyncio.all_tasks() == others


# --- the watchdog ----------------------------------------------------------------------------------------------------


async def said(world: World, text: str) -> None:
    """Wait until the run prints this; the watchdog looks every few milliseconds of real time."""
    heard = asyncio.Event()
    say = world.display.print_line

    def listen(line: str, *level: int) -> None:
        say(line, *level)
        if text in line:
            heard.set()

    world.display.print_line = listen  # type: ignore[method-assign]
    await heard.wait()


@pytest.mark.parametrize(
    ("hold", "report"),
    [
        ("train 2", r"nothing has moved for 500 s\. train has been at it for 500 s: step 2, samples 4"),
        ("play 2", r"rollout has been at it for 500 s: group 2, attempt 0"),
        ("pull v1", r"pull has been at it for 500 s: version v1"),
        ("evaluate v2", r"evaluate has been at it for 500 s: version v2"),
        ("warm up 0", r"warm_up has been at it for 500 s: step 1 of 2"),
    ],
)
async def test_the_watchdog_names_the_task_that_all_others_wait_for(hold, report):
    world = World(steps=2, groups=2, warmup=2, watchdog_seconds=0.005)
    world.script.holds = lambda gate: gate == hold
    async with world.running() as run:
        assert world.script.held == [hold]
        world.now += 500
        await said(world, "watchdog: ")
        await finish(world)
        await run
    assert re.search(report, world.printed)


# --- random schedules: whatever finishes first ---


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("staleness", "window"), [(0, 1), (1, 1), (2, 5)])
async def test_any_order_of_events_trains_every_group_once_and_none_too_old(seed, staleness, window):
    chance = random.Random(f"{seed} {staleness} {window}")
    world = World(
        steps=6,
        groups=3,
        staleness=staleness,
        window=window,
        every=chance.choice([0, 1, 2]),
        max_live=chance.choice([2, 3, 4]),
        filter="no_variance",
        warmup=chance.choice([0, 2]),
    )
    unlucky = set(chance.sample(range(18), 3))
    world.rollouts.outcome = lambda request: (
        chance.choice([(), (1.0, 1.0)])
        if request.purpose is Purpose.TRAIN and request.group_id in unlucky
        else (0.0, 1.0)
    )
    world.script.holds = lambda gate: chance.random() < 0.8
    lost = chance.randrange(1, 7)
    world.script.errors[f"train {lost}"] = []
    async with world.running() as run:
        while not run.done():
            gate = chance.choice(world.script.held)
            if gate == f"train {lost}" and lost:
                batch = world.loop.ledger.buffer.batch
                assert batch is not None
                world.script.errors[gate] = [SamplesLost("gone", (chance.choice(batch.group_ids),))]
                lost = 0
            await world.script.open(gate)
        summary = await run
    trained = [group for batch in world.trainer.batches for group in batch]
    assert len(trained) == len(set(trained)) == 18
    assert not set(trained) & unlucky
    assert max(summary.ages) <= staleness + (-(-(window - 1) // 3) if staleness else 0)
    assert world.rollouts.owned == {}
    assert world.trainer.live == [(0, 6)]
    assert sorted(world.trainer.freed + world.trainer.live) == sorted(set(world.trainer.freed + world.trainer.live))
    every = world.system.config.evaluation.every
    due = [step for step in range(7) if step in (0, 6) or (every and step % every == 0)]
    assert [version.step for version in world.rollouts.evaluated] == due
