"""What a step reports, against numbers worked out by hand; and what each kind of group is asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from scripted_system import World

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.loop.system import System
from titan_rl.rollout.report import GroupReport
from titan_rl.types import GroupRequest, PolicyVersion, Purpose, StopReason


def playing(world: World, **differences: dict[int, Any]) -> None:
    """Let rollout `n` of every group differ from the scripted one in these fields, where they have a value for it."""
    run_group = world.rollouts.run_group

    async def run(request: GroupRequest) -> GroupReport:
        world.now += 1.0
        report = await run_group(request)
        rollouts = tuple(
            structs.replace(
                each, **{name: values[each.sample] for name, values in differences.items() if each.sample in values}
            )
            for each in report.rollouts
        )
        return dataclasses.replace(report, rollouts=rollouts)

    world.rollouts.run_group = run  # type: ignore[method-assign]


def step_numbers(world: World) -> list[dict[str, float]]:
    return [numbers for _, numbers in world.metrics.written if "rollout/tokens" in numbers]


async def test_the_numbers_of_a_step_are_those_of_its_rollouts() -> None:
    world = World(steps=1, groups=2)
    world.rollouts.outcome = lambda request: (0.0, 1.0, 2.0) if request.group_id else (3.0, 3.0, 3.0)
    playing(
        world,
        sampled_tokens={0: 1, 1: 5, 2: 6},
        turn_count={2: 4},
        truncated={1: True},
        branch_count={0: 2},
        rendered_anew={0: 3},
        stop_reason={2: StopReason.LENGTH},
        reward_parts={0: {"right": 0.5}, 1: {"right": 1.0}},
    )
    await world.run()
    (numbers,) = step_numbers(world)
    expected = {
        "rollout/reward_mean": 2.0,  # of 3 3 3 0 1 2
        "rollout/reward_std": (8 / 6) ** 0.5,  # squares 1 1 1 4 1 0
        "rollout/tokens": 24,
        "rollout/tokens_per_second": 12.0,  # the clock moved by 1 s for each group
        "rollout/length_mean": 4.0,
        "rollout/length_max": 6,
        "rollout/truncated_share": 1 / 3,
        "rollout/failed": 0,
        "rollout/stop_stop": 2 / 3,
        "rollout/stop_length": 1 / 3,
        "rollout/turns_mean": 2.0,
        "rollout/branched": 2,
        "rollout/rendered_anew": 6,
        "reward/right": 0.75,
        "staleness/age_mean": 0.0,
        "staleness/age_max": 0,
        "groups/admitted": 2,
        "groups/failed": 0,
        "groups/equal_rewards": 0.5,
        "data_plane/held_samples": 0,  # all are trained
        "data_plane/held_bytes": 0,
        "seconds/step": 2.0,
    }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)
    assert world.loop.ledger.summary.tokens_generated == 24


async def test_a_failed_rollout_has_no_reward_and_its_tokens_count() -> None:
    world = World(steps=1, groups=1)
    world.rollouts.outcome = lambda request: (0.0, 1.0, 5.0)
    playing(world, error={2: "the grader raised"}, sampled_tokens={0: 2, 1: 2, 2: 8})
    await world.run()
    (numbers,) = step_numbers(world)
    expected = {"rollout/reward_mean": 0.5, "rollout/reward_std": 0.5, "rollout/tokens": 12, "rollout/failed": 1}
    assert {name: numbers[name] for name in expected} == expected


async def test_ages_are_counted_from_the_version_that_sampled() -> None:
    world = World(steps=4, groups=2, staleness=1)
    await world.run()
    ages = [numbers["staleness/age_mean"] for numbers in step_numbers(world)]
    assert ages[0] == 0.0 and max(ages) == 1.0
    for numbers in step_numbers(world):
        fresh, old = numbers["staleness/share_of_age_0"], numbers["staleness/share_of_age_1"]
        assert fresh + old == 1.0 and numbers["staleness/age_mean"] == old


def system(config: RunConfig) -> System:
    parts: Any = None
    return System(config=config, model_path=Path(), trainer=parts, router=parts, rollouts=parts, generators=dict)


V3 = PolicyVersion(0, 3)


@pytest.mark.parametrize(("exact", "wanted"), [(False, None), (True, V3)])
def test_what_a_group_asks_for(exact: bool, wanted: PolicyVersion | None) -> None:
    config = copy4()
    sampling = dataclasses.replace(config.rollout.sampling, temperature=0.7, top_p=0.9, top_k=5)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, sampling=sampling))
    train = system(config).train_group(5, V3, 8, exact=exact, attempt=2)
    held_out = system(config).held_out_group(5, V3)
    assert (train.purpose, train.samples, train.attempt) == (Purpose.TRAIN, 8, 2)
    assert (held_out.purpose, held_out.samples) == (Purpose.EVALUATE, 1)
    assert (train.sampling.temperature, held_out.sampling.temperature) == (0.7, 0.0), "held-out prompts are greedy"
    assert (train.sampling.top_p, train.sampling.top_k, train.sampling.min_p) == (0.9, 5, 0.0)
    assert not held_out.sampling.truncates, "nor is anything left out of them"
    assert (train.exact_version, held_out.exact_version) == (wanted, V3)
    for group in (train, held_out):
        assert (group.group_id, group.min_version) == (5, V3)
        assert group.sampling.max_new_tokens == 6
