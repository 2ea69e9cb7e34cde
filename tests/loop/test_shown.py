"""What a run shows of its rollouts: of each step's those that failed, of an evaluation a few transcripts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from scripted_system import World, rollout

from titan_rl.errors import TaskError
from titan_rl.loop.stages import evaluate
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.types import PolicyVersion, StopReason
from titan_rl.view.conversation import transcript

WRONG = "wrong  '{0}=' → '7', wanted '{0}{0}', reward 0.500"
RIGHT = "right  '{0}=' → '7', reward 1.000"


async def evaluated(*rollouts: RolloutRecord) -> tuple[str, ...]:
    world = World(steps=1, groups=1)
    world.rollouts.held_out = len(rollouts)
    world.rollouts.evaluation = rollouts
    world.router.serving = PolicyVersion(0, 0)
    world.router.wanted = [PolicyVersion(0, 0)]
    return tuple(map(transcript, (await evaluate(world.system, PolicyVersion(0, 0))).rollouts))


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [
        ((1.0, 0.5, 1.0, 0.5, 0.5), (WRONG.format(1), WRONG.format(3), RIGHT.format(0))),
        ((1.0, 1.0, 1.0, 0.5), (WRONG.format(3), RIGHT.format(0), RIGHT.format(1))),
        ((1.0, 1.0, 1.0, 1.0), (RIGHT.format(0), RIGHT.format(1), RIGHT.format(2))),
        ((0.5, 0.5, 0.5), (WRONG.format(0), WRONG.format(1))),
    ],
)
async def test_the_first_wrong_and_right_ones_are_shown(rewards, shown):
    assert await evaluated(*(rollout(0, reward) for reward in rewards)) == shown


async def test_a_cut_off_answer_is_told_from_a_finished_one():
    (line,) = await evaluated(msgspec.structs.replace(rollout(0, 0.5), truncated=True))
    assert line == "wrong  '0=' → '7' (cut off), wanted '00', reward 0.500"


async def test_a_group_that_failed_is_told_at_once_and_its_steps_line_says_the_rest():
    world = World(steps=2, groups=2)
    world.rollouts.outcome = lambda request: () if request.group_id == 1 else (0.0, 1.0)
    await world.run()
    lines = world.printed.splitlines()
    failed = lines.index("failed rollouts: 1, in 1 of the 1 groups played: 1 × task: the task raised")
    assert failed < next(place for place, line in enumerate(lines) if line.startswith("step    2/2"))
    (last,) = (line for line in lines if line.startswith("step    2/2"))
    assert "  reward 0.500  entropy 1.00  truncated 0%  tokens/s " in last


@pytest.mark.parametrize("deterministic", [True, False])
async def test_a_deterministic_run_says_which_step_the_clock_had_a_part_in_and_every_run_how_long_its_rollouts_were(
    deterministic, monkeypatch
):
    world = World(steps=2, deterministic=deterministic)
    play = world.rollouts.run_group

    async def late(request):
        report = await play(request)
        ended = [
            msgspec.structs.replace(each, stop_reason=StopReason.TIMEOUT, sampled_tokens=9)
            for each in report.rollouts[:1]
        ]
        return replace(report, rollouts=(*ended, *report.rollouts[1:])) if request.group_id == 2 else report

    monkeypatch.setattr(world.rollouts, "run_group", late)
    await world.run()
    said = "1 rollout of step 2 ended by the clock: this run may not repeat bit for bit"
    assert (said in world.printed) is deterministic
    lengths = [
        numbers.get("rollout/timeout_length_max") for _, numbers in world.metrics.written if "train/loss" in numbers
    ]
    assert lengths == [None, 9]


async def test_a_held_out_rollout_without_a_reward_is_counted_and_shown_and_neither_right_nor_wrong():
    world = World(steps=1)
    world.rollouts.evaluation = (rollout(0, 1.0), rollout(0, 0.0, "boom 1"))
    summary = await world.run()
    assert [(each.exact_match, each.prompts, each.failed) for each in summary.evaluations] == [(1.0, 1, 1)] * 2
    assert "1 of 2 held-out rollouts failed and are not counted; the first: task: boom 1" in world.printed
    assert [1, 1] == [each["evaluation/failed"] for _, each in world.metrics.written if "evaluation/failed" in each]


async def test_an_evaluation_of_which_nothing_is_graded_ends_the_run_with_the_cause():
    world = World(steps=1)
    world.rollouts.evaluation = (rollout(0, 0.0, "boom 0"), rollout(0, 0.0, "boom 1"))
    with pytest.raises(TaskError, match="all 2 held-out rollouts failed; the first: task: boom 0"):
        await world.run()
