"""Rollouts that fail change nothing for the others: no reward, no advantage, no sample (15 s: time-outs)."""

import asyncio
import random
from collections import Counter

import numpy as np
import pytest
from support.rollouts import TASKS, ScriptedPolicy, request, runner, sample_of
from support.tasks import failing

from titan_rl.errors import RequestError
from titan_rl.rollout.config import AdvantageConfig
from titan_rl.types import FailureKind

FAILING = f"{TASKS / 'failing.py'}:Failing"
CALL = "<tool>{}</tool>"
SAYS = {
    FailureKind.TOOL: (CALL.format(failing.TOOL),),
    FailureKind.INFRASTRUCTURE: (CALL.format(failing.INFRASTRUCTURE),),
    FailureKind.TASK: (CALL.format("1"), failing.TASK),
    FailureKind.GRADER: (CALL.format("1"), failing.GRADER),
    FailureKind.TIMEOUT: (CALL.format("1"), failing.TIMEOUT),
    FailureKind.REQUEST: (CALL.format("1"), RequestError("over-long")),
}
GROUPS, SURVIVORS, OF_EACH = 3, 28, 2  # 2 of 40 rollouts are 5 %


def says(member: int, group: int) -> tuple[str, str]:
    """The turns of the survivor of this number in its group."""
    return CALL.format(member), "7" * (1 + (member * (group + 2)) % 7)


async def played(model_path, turns, samples, **settings):
    """The groups in which rollouts say these turns, by group and sample."""
    policy = ScriptedPolicy(model_path, lambda asked: turns[asked_group(asked), sample_of(asked)][turn_of(asked)])
    async with runner(model_path, FAILING, step_seconds=5.0, **settings) as group_runner:
        groups = (request(group, samples=samples, max_new_tokens=12) for group in range(GROUPS))
        return await asyncio.gather(*(group_runner.run_group(each, policy) for each in groups))


def asked_group(asked) -> int:
    return int(asked.request_id.split("-")[1])


def turn_of(asked) -> int:
    return int(asked.request_id.split("-")[3])


def given_to_the_trainer(result) -> list:
    arrays = ("token_ids", "loss_mask", "logprobs", "versions", "advantages")
    return [
        (each.group_id, each.reward, each.advantage, *(getattr(each, name).tobytes() for name in arrays))
        for each in result.samples
    ]


@pytest.mark.parametrize("advantage", ["grpo", "opo"])
async def test_a_group_with_failures_of_every_kind_is_trained_as_if_they_had_never_been(calling_path, advantage):
    chance = random.Random(advantage)
    failed = [kind for kind in FailureKind for _ in range(OF_EACH)]
    turns, without = {}, {}
    for group in range(GROUPS):
        members = [SAYS[kind] for kind in failed] + [None] * SURVIVORS
        chance.shuffle(members)
        survivors = [sample for sample, turn in enumerate(members) if turn is None]
        for number, sample in enumerate(survivors):
            members[sample] = without[group, number] = says(number, group)
        turns |= {(group, sample): turn for sample, turn in enumerate(members)}
    settings = {"advantage": AdvantageConfig(name=advantage)}
    with_failures = await played(calling_path, turns, SURVIVORS + len(failed), **settings)
    alone = await played(calling_path, without, SURVIVORS, **settings)
    for result, other in zip(with_failures, alone, strict=True):
        graded = [each for each in result.rollouts if not each.error]
        assert Counter(each.failure for each in result.rollouts if each.error) == Counter(failed)
        assert [each.reward for each in graded] == [each.reward for each in other.rollouts]
        assert [each.reward_parts for each in graded] == [each.reward_parts for each in other.rollouts]
        assert given_to_the_trainer(result) == given_to_the_trainer(other)
        assert [each.sample for each in result.samples] == [each.sample for each in graded]
        assert len({each.reward for each in graded}) > 3 and np.ptp([each.advantage for each in result.samples]) > 0
