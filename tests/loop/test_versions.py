"""Who holds which publication: freed once, not before the last holder lets go, never the newest."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_parts import ScriptedTrainer
from scripted_system import Script, World, settle

from titan_rl.errors import WeightsError
from titan_rl.loop.changes import Changes
from titan_rl.loop.versions import FRESH_PUBLICATIONS, Publications
from titan_rl.metrics.activity import Activities
from titan_rl.types import PolicyVersion
from titan_rl.view.display import RunDisplay


def publications(max_live: int, activity: Activities | None = None) -> tuple[Publications, ScriptedTrainer]:
    trainer, changes = ScriptedTrainer(Script()), Changes(RunDisplay(steps=1, live=False), activity or Activities())
    return Publications(trainer, changes, max_live=max_live), trainer  # type: ignore[arg-type]


async def publish(publications: Publications, trainer: ScriptedTrainer, holder: str = "served") -> PolicyVersion:
    publication = await publications.publish(holder)
    trainer.step += 1
    return publication.version


@settings(deadline=None)
@given(max_live=st.integers(2, 4), choices=st.lists(st.integers(0, 99), max_size=60))
def test_in_any_order_everything_is_freed_exactly_once_and_nothing_that_is_held(max_live, choices):
    async def play() -> None:
        weights, trainer = publications(max_live)
        held: list[tuple[PolicyVersion, str]] = []
        published: list[PolicyVersion] = []
        for number, choice in enumerate(choices):
            if choice % 3 == 0 and not weights.waits_for():
                published.append(await publish(weights, trainer))
                held.append((published[-1], "served"))
            elif choice % 3 == 1 and trainer.live:
                version = trainer.live[choice % len(trainer.live)]
                weights.hold(version, f"holder {number}")
                held.append((version, f"holder {number}"))
            elif held:
                await weights.release(*held.pop(choice % len(held)))
            needed = {version for version, _ in held} | set(published[-1:])
            assert set(trainer.live) == needed
            assert len(trainer.live) <= max_live
        assert sorted(trainer.freed + trainer.live) == published

    asyncio.run(play())


async def test_a_publication_waits_for_a_place_and_says_who_holds_them():
    activity = Activities()
    weights, trainer = publications(2, activity)
    first, second = await publish(weights, trainer, "evaluation"), await publish(weights, trainer)
    third = asyncio.create_task(weights.publish("served"))
    await settle()
    place = "a place for one more publication (weights.max_live is 2); held: v0 by evaluation; v1 by served"
    assert f"publisher waits for {place} (0 s)" in activity.stuck(0)
    assert trainer.script.events.count("publish v2") == 0
    await weights.release(second, "served")  # the newest stays
    await settle()
    assert not third.done()
    await weights.release(first, "evaluation")
    assert (await third).version == (0, 2)
    assert trainer.freed == [first, second]


def refused(times: int) -> list[BaseException]:
    return [WeightsError(f"v1 is served by nobody: refused {number}") for number in range(times)]


@pytest.mark.parametrize("times", [1, FRESH_PUBLICATIONS])
async def test_what_nobody_serves_is_published_again_and_the_run_goes_on(times, caplog):
    world = World(steps=3)
    world.script.errors["pull v1"] = refused(times)
    await world.run()
    assert world.trainer.step == 3
    assert world.script.events.count("publish v1") == 1 + times
    for text in (world.printed, caplog.text):
        assert text.count("v1 is served by nobody: refused 0; the trainer publishes its weights again") == 1
        assert text.count("publishes its weights again") == times
    assert sorted(world.trainer.freed + world.trainer.live) == [
        PolicyVersion(0, step) for step in [0, *[1] * times, 1, 2, 3]
    ]
    assert world.trainer.live == [(0, 3)]


async def test_a_fresh_publication_that_nobody_serves_either_ends_the_run():
    world = World(steps=3)
    world.script.errors["pull v1"] = refused(1 + FRESH_PUBLICATIONS)
    with pytest.raises(WeightsError, match=f"refused {FRESH_PUBLICATIONS}$"):
        await world.run()
    assert world.script.events.count("publish v1") == 1 + FRESH_PUBLICATIONS


async def test_a_trainer_that_is_a_step_further_publishes_that_instead():
    world = World(steps=4, staleness=1, max_live=3)
    world.script.holds = lambda gate: gate in ("pull v1", "train 2")
    world.script.errors["pull v1"] = refused(1)
    async with world.running() as run:
        world.script.holds = lambda gate: False
        await world.script.open("train 2")
        assert world.trainer.step == 2 and world.script.held == ["pull v1"]
        await world.script.open("pull v1")
        await run
    assert world.script.events.count("publish v1") == 1
    assert world.trainer.step == 4 and world.trainer.live == [(0, 4)]


async def test_weights_that_nobody_loads_after_an_evaluation_do_not_end_the_run():
    world = World(steps=3, staleness=1, max_live=3)
    world.script.holds = lambda gate: gate in ("evaluate v0", "train 2")
    async with world.running() as run:
        world.script.errors["pull v1"] = [WeightsError("v1 is not what the engine computes with")]
        await world.script.open("evaluate v0")
        await world.script.open("train 2")
        await run
    assert world.trainer.step == 3
    assert "after the evaluation of v0: v1 is not what the engine computes with" in world.printed


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_newest_version_is_wanted_and_each_that_is_evaluated_or_plays_an_exact_group(deterministic):
    world = World(steps=3, groups=2, staleness=1, max_live=4, deterministic=deterministic)
    world.script.holds = lambda gate: gate in ("evaluate v0", "play 3", "play 4")
    async with world.running() as run:
        assert world.router.wanted == [(0, 0), (0, 1)]
        await world.script.open("evaluate v0")
        assert world.router.wanted == ([(0, 0), (0, 1)] if deterministic else [(0, 1)])
        await world.script.open("play 3")
        assert world.router.wanted == ([(0, 1)] if deterministic else [(0, 2)])
        await world.script.open("play 4")
        await run
    assert world.router.wanted == [(0, 3)] and world.trainer.live == [(0, 3)]
