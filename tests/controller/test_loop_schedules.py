"""The training loop under random schedules: whatever finishes first, what must hold holds."""

import random

import pytest
from scripted_system import World

from titan_rl.errors import SamplesLost
from titan_rl.types import Purpose


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
    assert all(asked == served for asked, served in world.rollouts.evaluated_at)
    every = world.system.config.evaluation.every
    due = [step for step in range(7) if step in (0, 6) or (every and step % every == 0)]
    assert [asked.step for asked, _ in world.rollouts.evaluated_at] == due
