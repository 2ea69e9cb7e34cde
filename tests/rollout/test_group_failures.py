"""What fails in a group, what that costs, and how rollouts are compared without it (12 s)."""

import asyncio
import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace
from support.rollouts import UNRULY, ScriptedPolicy, digits_but, request, runner, sample_of

from titan_rl.errors import ConfigError, GeneratorFailed, RequestError
from titan_rl.importing import import_name
from titan_rl.rollout.config import AdvantageConfig
from titan_rl.rollout.rollouter import Rollouter


@pytest.mark.parametrize("how", ["raise", "exit", "crash", "hang"])
async def test_a_grader_that_fails_costs_its_own_group_only(model_path, how):
    policy = ScriptedPolicy(model_path)
    limit = 5.0 if how == "hang" else 60.0  # the good grader's too: far more than it needs
    async with runner(
        model_path, f"{UNRULY}:Unruly", kwargs={"behaviour": {"1": how}}, step_seconds=limit
    ) as group_runner:
        bad, good = await asyncio.gather(
            group_runner.run_group(request(1, samples=2), policy), group_runner.run_group(request(2, samples=2), policy)
        )
    assert all("score of train prompt 1: " in rollout.error for rollout in bad.rollouts)
    assert all(len(each.turns) == 1 and each.messages for each in bad.trajectories)  # kept
    assert bad.samples == ()
    assert [rollout.error for rollout in good.rollouts] == ["", ""] and len(good.samples) == 2


async def test_a_group_reports_the_processes_that_died_since_the_last_one(model_path):
    policy = ScriptedPolicy(model_path)
    async with runner(model_path, f"{UNRULY}:Unruly", kwargs={"behaviour": {"1": "crash"}}) as group_runner:
        results = [await group_runner.run_group(request(group, samples=2), policy) for group in range(3)]
    assert [result.restarts for result in results] == [0, 2, 0]


async def test_a_prompt_that_cannot_be_made_fails_its_group(model_path):
    kwargs = {"behaviour": {"1": "example raise"}}
    async with runner(model_path, f"{UNRULY}:Unruly", kwargs=kwargs) as group_runner:
        result = await group_runner.run_group(request(1), ScriptedPolicy(model_path))
    assert [("boom" in rollout.error, rollout.turn_count) for rollout in result.rollouts] == [(True, 0)] * 4


async def test_a_refused_request_costs_its_rollout_and_the_others_are_compared_without_it(model_path):
    def answer(a_request):
        return RequestError("over-long") if sample_of(a_request) == 2 else "1" * sample_of(a_request)

    async with runner(model_path, f"{UNRULY}:Unruly") as group_runner:
        result = await group_runner.run_group(request(0, max_new_tokens=3), ScriptedPolicy(model_path, answer))
    assert [rollout.error for rollout in result.rollouts] == ["", "", "over-long", ""]
    assert [rollout.truncated for rollout in result.rollouts] == [False, False, False, True]
    assert [sample.sample for sample in result.samples] == [0, 1, 3]
    rewards = np.array([1.0, 1.0, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    assert [sample.advantage for sample in result.samples] == pytest.approx(expected.tolist())


async def test_a_failed_rollout_can_fail_its_group_which_then_trains_nothing(model_path):
    async with runner(model_path, f"{UNRULY}:Unruly", on_error="fail_group") as group_runner:
        failed = await group_runner.run_group(request(0), ScriptedPolicy(model_path, digits_but(2)))
        good = await group_runner.run_group(request(1), ScriptedPolicy(model_path))
    assert failed.samples == () and [bool(rollout.error) for rollout in failed.rollouts] == [False, False, True, False]
    assert len(good.samples) == 4


@pytest.mark.parametrize("cls", ["Compared", "ComparedAsync"])
async def test_a_group_is_compared_without_the_rollouts_that_failed(model_path, cls):
    async with runner(model_path, f"{UNRULY}:{cls}") as group_runner:
        result = await group_runner.run_group(request(0), ScriptedPolicy(model_path, digits_but(1)))
    assert [rollout.reward for rollout in result.rollouts] == [1.0, 0.0, 0.5, 0.0]
    assert [rollout.reward_parts for rollout in result.rollouts if not rollout.error] == [
        {"obedient": 1.0, "exact_match": 1.0, "place": place} for place in (0.0, 1.0, 2.0)
    ]
    assert [sample.reward for sample in result.samples] == [1.0, 0.5, 0.0]
    assert result.samples[0].advantage == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("how", ["together raise", "together crash"])
async def test_a_comparison_that_fails_costs_its_group_only(model_path, how):
    kwargs = {"behaviour": {"1": how}}
    async with runner(model_path, f"{UNRULY}:Compared", kwargs=kwargs) as group_runner:
        policy = ScriptedPolicy(model_path)
        bad, good = await asyncio.gather(*(group_runner.run_group(request(index), policy) for index in (1, 2)))
    assert all("score of the group of train prompt 1" in rollout.error for rollout in bad.rollouts)
    assert bad.samples == () and len(good.samples) == 4


async def test_credit_that_raises_or_does_not_return_is_named(model_path, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import threading\n\nover = threading.Event()\n\n\ndef advantages(group, *, wait):\n"
        "    over.wait(None if wait else 0)\n    raise LookupError('no such score')\n"
    )
    for wait, sentence in (
        (True, r"within 0\.1 s \(environment\.grade_seconds\)"),
        (False, "line 8: LookupError: no such"),
    ):
        advantage = AdvantageConfig(name=f"{file}:advantages", kwargs={"wait": wait})
        async with runner(model_path, advantage=advantage) as group_runner:
            group_runner.setup = dataclasses.replace(group_runner.setup, grade_seconds=0.1 if wait else 60.0)
            with pytest.raises(ConfigError, match=rf"mine\.py.* {sentence}"):
                await group_runner.run_group(request(0), ScriptedPolicy(model_path))
    import_name(f"{file}:over").set()


async def test_a_rollout_that_takes_too_long_is_stopped_with_its_request(model_path):
    stopped = []

    async def never(a_request):
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(sample_of(a_request))

    async with runner(model_path, seconds=0.2) as group_runner:
        result = await group_runner.run_group(request(0, samples=2), never)
    assert [rollout.error for rollout in result.rollouts] == ["was not over within rollout.seconds (0.2 s)"] * 2
    assert result.samples == () and sorted(stopped) == [0, 1]


async def test_a_time_limit_of_ones_own_is_not_taken_for_the_rollouts(model_path):
    async with runner(model_path, seconds=60.0, rollouter=f"{__file__}:Impatient") as group_runner:
        result = await group_runner.run_group(request(0, samples=2), ScriptedPolicy(model_path))
    assert all("the rollouter raised TimeoutError" in rollout.error for rollout in result.rollouts)


async def test_a_rollouter_that_returns_no_record_fails_its_rollouts(model_path):
    async with runner(model_path, rollouter=f"{__file__}:Forgetful") as group_runner:
        result = await group_runner.run_group(request(0, samples=2), ScriptedPolicy(model_path))
    assert {each.error for each in result.rollouts} == {"the rollouter returned NoneType, expected RolloutRecord"}


class Forgetful(Rollouter):
    async def roll_out(self, group, sample, generate, rollout):
        await super().roll_out(group, sample, generate, rollout)


async def test_a_call_that_fails_uses_up_none_of_the_rollouts_tokens(model_path):
    async with runner(model_path, rollouter=f"{__file__}:Persistent", max_sampled_tokens=4) as group_runner:
        result = await group_runner.run_group(request(0, samples=2), ScriptedPolicy(model_path))
    assert [(rollout.error, rollout.turn_count) for rollout in result.rollouts] == [("", 1)] * 2


class Persistent(Rollouter):
    async def roll_out(self, group, sample, generate, rollout):
        async def refuse(request):
            raise RequestError("not now")

        with pytest.raises(RequestError, match="not now"):
            await self.complete(rollout.prompt, refuse, rollout)
        return await super().roll_out(group, sample, generate, rollout)


class Impatient(Rollouter):
    async def roll_out(self, group, sample, generate, rollout):
        raise TimeoutError("mine")


async def test_a_reward_beyond_all_bounds_costs_its_rollout(model_path):
    async with runner(model_path, rollouter=f"{__file__}:Generous") as group_runner:
        result = await group_runner.run_group(request(0), ScriptedPolicy(model_path))
    assert [rollout.error for rollout in result.rollouts] == ["", "", "", "the rollouter gave the reward 1e+308"]
    assert [rollout.reward for rollout in result.rollouts] == [0.0, 1.0, 2.0, 0.0]
    assert [sample.advantage for sample in result.samples] == pytest.approx([-1, 0, 1], abs=1e-3)


class Generous(Rollouter):
    async def roll_out(self, group, sample, generate, rollout):
        return replace(await super().roll_out(group, sample, generate, rollout), reward=(0.0, 1.0, 2.0, 1e308)[sample])


async def test_a_generator_that_fails_fails_the_group(model_path):
    def answer(a_request):
        return GeneratorFailed("engine 1 is gone") if sample_of(a_request) == 1 else "1"

    async with runner(model_path) as group_runner:
        with pytest.raises(GeneratorFailed, match="engine 1 is gone"):
            await group_runner.run_group(request(0), ScriptedPolicy(model_path, answer))
        assert len((await group_runner.run_group(request(1), ScriptedPolicy(model_path))).samples) == 4
