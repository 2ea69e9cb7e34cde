"""What rollouts have opened is closed, however they end (4 s)."""

import asyncio

import pytest
from support.rollouts import TASKS, ScriptedPolicy, request, runner, sample_of

from titan_rl.errors import GeneratorFailed, RequestError

LEASING = f"{TASKS / 'turns.py'}:Leasing"


async def wait_until_empty(directory):
    async with asyncio.timeout(20):
        while any(directory.iterdir()):
            await asyncio.sleep(0.01)


async def test_rollouts_that_were_graded_or_failed_are_cleaned_up_once(model_path, tmp_path):
    """Sample 0 has no state, 1 is refused its second turn, 2 is graded."""
    asked = []

    def answer(a_request):
        asked.append(sample := sample_of(a_request))
        return RequestError("over-long") if sample == 1 and asked.count(1) == 2 else str(sample)

    async with runner(model_path, LEASING, kwargs={"directory": str(tmp_path)}) as group_runner:
        result = await group_runner.run_group(request(samples=3), ScriptedPolicy(model_path, answer))
        assert [*tmp_path.iterdir()] == []
    assert [rollout.error for rollout in result.rollouts] == ["", "over-long", ""]


async def test_a_rollout_that_cannot_be_cleaned_up_fails_and_the_others_do_not(model_path, tmp_path):
    def answer(a_request):
        return "9" if sample_of(a_request) == 1 else "3"

    async with runner(model_path, LEASING, kwargs={"directory": str(tmp_path)}) as group_runner:
        result = await group_runner.run_group(request(samples=3), ScriptedPolicy(model_path, answer))
    assert ["the lease is stuck" in rollout.error for rollout in result.rollouts] == [False, True, False]
    assert len([*tmp_path.iterdir()]) == 1 and {sample.sample for sample in result.samples} == {0, 2}


async def test_rollouts_of_a_group_that_is_given_up_are_cleaned_up(model_path, tmp_path):
    second = asyncio.Event()

    async def answer(a_request):
        if any(tmp_path.iterdir()) and sample_of(a_request) == 1:
            second.set()
            await asyncio.sleep(3600)
        return await ScriptedPolicy(model_path, lambda each: "3")(a_request)

    async with runner(model_path, LEASING, kwargs={"directory": str(tmp_path)}) as group_runner:
        group = asyncio.create_task(group_runner.run_group(request(samples=2), answer))
        await second.wait()
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        await wait_until_empty(tmp_path)

        async def fails(a_request):
            if any(tmp_path.iterdir()):
                raise GeneratorFailed("it is gone")
            return await ScriptedPolicy(model_path, lambda each: "3")(a_request)

        with pytest.raises(GeneratorFailed):
            await group_runner.run_group(request(samples=2), fails)
    await wait_until_empty(tmp_path)  # the end of a worker waits for it
