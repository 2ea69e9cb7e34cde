"""Whole groups, from a prompt's index to advantages and training samples, with a scripted policy (8 s)."""

import asyncio
import os
from pathlib import Path

import pytest
from support.processes import descendants, ends
from support.rollouts import EOS, TASKS, UNRULY, ScriptedPolicy, request, runner, sample_of

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.errors import ConfigError, TaskError
from titan_rl.loop.recording import choose_evaluated
from titan_rl.rollout.report import report_of
from titan_rl.rollout.rollouter import Rollouter
from titan_rl.seeding import prompt_digest, request_seed
from titan_rl.types import NO_VERSION, Message, PolicyVersion, Purpose, SamplingParams
from titan_rl.view.conversation import transcript


async def test_a_group_becomes_rewards_advantages_and_samples(model_path):
    async with runner(model_path) as group_runner:
        prompt = {}

        def answer(a_request):  # sample 0 copies, the others say one digit
            digits = "".join(str(token - 2) for token in a_request.prompt_token_ids[:4])
            prompt[sample_of(a_request)] = digits
            return digits if sample_of(a_request) == 0 else ""

        result = await group_runner.run_group(request(5), ScriptedPolicy(model_path, answer))
    assert [rollout.reward for rollout in result.rollouts] == [1.0, 0.0, 0.0, 0.0]
    assert result.rollouts[0].reward_parts == {"positions_equal": 1.0, "exact_match": 1.0}
    assert result.trajectories[0].messages == [Message("user", prompt[0] + "="), Message("assistant", prompt[0])]
    first = result.samples[0]
    assert first.token_ids.tolist() == [*(int(digit) + 2 for digit in prompt[0]), 12, *first.token_ids[:4], EOS]
    assert first.loss_mask.tolist() == [False] * 5 + [True] * 5
    assert first.logprobs.tolist() == [0.0] * 5 + [-0.5] * 5
    assert first.versions.tolist() == [NO_VERSION] * 5 + [PolicyVersion(0, 3).encode()] * 5
    assert [sample.advantage for sample in result.samples] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3)
    assert [sample.sample for sample in result.samples] == [0, 1, 2, 3]


async def test_a_request_says_all_that_routing_and_sampling_need(model_path):
    policy = ScriptedPolicy(model_path)
    async with runner(model_path) as group_runner:
        await group_runner.run_group(request(5), policy)
        await group_runner.run_group(request(5), policy)  # the same group once more
    first, again = policy.requests[:4], policy.requests[4:]
    assert [each.seed for each in first] == [
        request_seed(11, Purpose.TRAIN, 5, sample, prompt_digest(each.prompt_token_ids))
        for sample, each in enumerate(first)
    ]
    assert [each.seed for each in again] == [each.seed for each in first]
    assert len({each.request_id for each in policy.requests}) == len({each.session_id for each in policy.requests}) == 8
    assert all(each.request_id.startswith("train-5-") for each in policy.requests)
    assert {each.min_version for each in policy.requests} == {PolicyVersion(0, 3)}
    assert {each.sampling for each in policy.requests} == {SamplingParams(max_new_tokens=6, stop_token_ids=(EOS,))}


async def test_evaluation_plays_the_held_out_list_and_trains_nothing(model_path):
    policy = ScriptedPolicy(model_path)
    async with runner(model_path, held_out=50) as group_runner:
        results = await asyncio.gather(
            *(
                group_runner.run_group(request(index, purpose=Purpose.EVALUATE, samples=1, temperature=0.0), policy)
                for index in range(50)
            )
        )
        beyond = await group_runner.run_group(request(50, purpose=Purpose.EVALUATE, samples=1), policy)
    assert all(result.samples == () for result in results)
    assert all("exact_match" in result.rollouts[0].reward_parts for result in results)
    assert len({result.trajectories[0].messages[0] for result in results}) == 50
    assert {each.sampling.temperature for each in policy.requests} == {0.0}
    assert "no held-out prompt 50" in beyond.rollouts[0].error


async def test_a_record_of_an_evaluation_shows_what_was_asked_said_and_wanted(model_path):
    async def recorded(group_runner, index):
        asked = request(index, purpose=Purpose.EVALUATE, samples=1)
        result = await group_runner.run_group(asked, policy)
        (chosen,) = choose_evaluated(0, [report_of(asked, result, ())])
        return result.describe(chosen, group_runner.renderer.decode, count=1)

    policy = ScriptedPolicy(model_path, lambda a_request: "7")
    async with runner(model_path, f"{TASKS / 'double.py'}:Double", held_out=50) as group_runner:
        found = await recorded(group_runner, 3)
    (asked,) = policy.requests
    assert [each["content"] for each in found.messages] == ["3=", "7"] and found.wanted == "6"
    assert found.turns[0].seed == request_seed(11, Purpose.EVALUATE, 3, 0, prompt_digest(asked.prompt_token_ids))
    (branch,) = found.branches
    assert branch.texts == ["3", "=", "7", "<eos>"] and branch.trained == [0, 0, 1, 1]
    assert branch.logprobs == [None, None, -0.5, -0.5] and branch.versions == ["", "", "v3", "v3"]
    assert branch.trainer_logprobs is branch.weights is None
    async with runner(model_path, f"{UNRULY}:Countdown", held_out=3) as group_runner:
        said = transcript(await recorded(group_runner, 2))
    assert "→ 'assistant: 7  user: 1=  assistant: 7  user: 2=  assistant: 7  user: 3='" in said


class Forgetful(SymbolRenderer):
    """A chat format that shows the policy its own words as if it had stopped before it did."""

    def render(self, messages, tools=()):
        return [token_id for token_id in super().render(messages, tools) if token_id != EOS]

    def extend(self, prompt, completion, messages, tools=()):
        raise TaskError("what was sampled would change")


async def test_a_history_that_cannot_be_extended_is_rendered_anew_and_becomes_a_branch(model_path, monkeypatch):
    monkeypatch.setattr("titan_rl.rollout.group_runner.make_renderer", lambda name, path, settings: Forgetful(path))
    policy = ScriptedPolicy(model_path, lambda a_request: "7")
    async with runner(model_path, f"{UNRULY}:Countdown") as group_runner:
        result = await group_runner.run_group(request(4, samples=1), policy)
    (rollout,) = result.rollouts
    assert rollout.error == "" and rollout.reward == 3.0
    seven, equals = 9, 12
    assert [(sample.token_ids.tolist(), sample.loss_mask.sum()) for sample in result.samples] == [
        ([6, equals, seven, EOS], 2),  # the end of the first turn is in no later prompt
        ([6, equals, seven, 3, equals, seven, EOS], 2),
        ([6, equals, seven, 3, equals, seven, 4, equals, seven, EOS], 2),
    ]
    reported = report_of(request(4, samples=1), result, ())
    assert reported.rollouts[0].branch_count == 3 and reported.rollouts[0].turn_count == 3


async def test_branches_of_a_rollout_are_samples_with_numbers_of_their_own(model_path):
    async with runner(model_path, rollouter=f"{__file__}:Forking") as group_runner:
        result = await group_runner.run_group(request(0), ScriptedPolicy(model_path, lambda a_request: "1"))
    assert [sample.sample for sample in result.samples] == [0, 4, 1, 5, 2, 6, 3, 7]
    for rollout in result.rollouts:
        assert len({sample.advantage for sample in result.samples if sample.sample % 4 == rollout.sample}) == 1
    assert [sample.loss_mask.sum() for sample in result.samples] == [2] * 8


class Forking(Rollouter):
    """Asks the same twice, as a program that talks to the policy might, and is graded for the last answer."""

    async def roll_out(self, group, sample, generate, rollout):
        played = await super().roll_out(group, sample, generate, rollout)
        await self.complete(rollout.prompt, generate, rollout)
        return played


@pytest.mark.parametrize("cls", ["Countdown", "CountdownAsync"])
async def test_a_conversation_goes_on_from_its_exact_tokens(model_path, cls):
    policy = ScriptedPolicy(model_path, lambda a_request: "7")
    async with runner(model_path, f"{UNRULY}:{cls}") as group_runner:
        result = await group_runner.run_group(request(4, samples=1), policy)
    (rollout,) = result.rollouts
    assert rollout.error == ""
    assert [message.content for message in result.trajectories[0].messages] == ["4=", "7", "1=", "7", "2=", "7", "3="]
    assert rollout.reward == 3.0  # the state came back, of a class that only the task's file knows
    seven, equals = 9, 12
    assert result.samples[0].token_ids.tolist() == [6, equals, seven, EOS, 3, equals, seven, EOS, 4, equals, seven, EOS]
    assert result.samples[0].loss_mask.tolist() == [False, False, True, True] * 3
    assert [each.prompt_token_ids.tolist() for each in policy.requests] == [
        result.samples[0].token_ids[:length].tolist() for length in (2, 6, 10)
    ]
    assert [each.seed for each in policy.requests] == [
        request_seed(11, Purpose.TRAIN, 4, 0, prompt_digest(each.prompt_token_ids)) for each in policy.requests
    ]
    assert len({each.seed for each in policy.requests}) == 3
    assert len({each.session_id for each in policy.requests}) == 1
    assert len({each.request_id for each in policy.requests}) == 3


async def test_processes_that_die_between_turns_lose_no_conversation(model_path):
    killed = []

    async def policy(a_request):
        if a_request.request_id.split("-")[3] == "1" and not killed:
            host = group_runner.pool.pid
            killed.extend([host, *descendants(host)])
            os.kill(host, 9)
            for pid in killed:
                assert await asyncio.to_thread(ends, pid)
            while not group_runner.pool.restarts:
                await asyncio.sleep(0)
        return await scripted(a_request)

    scripted = ScriptedPolicy(model_path, lambda a_request: "7")
    async with runner(model_path, f"{UNRULY}:Countdown") as group_runner:
        result = await group_runner.run_group(request(4, samples=1), policy)
        assert len(killed) >= 3 and result.restarts > 0  # the host, a reaper and its child
    assert [(rollout.error, rollout.reward) for rollout in result.rollouts] == [("", 3.0)]


async def test_a_prompt_with_a_foreign_character_is_an_error_that_names_it(model_path):
    task = Path(__file__).resolve().parents[2] / "rl_configs" / "alphabet_sort.py"
    async with runner(model_path, f"{task}:AlphabetSort") as group_runner:
        result = await group_runner.run_group(request(0), ScriptedPolicy(model_path))
    assert "no symbol 'S'" in result.rollouts[0].error


async def test_a_users_task_is_one_file(model_path):
    def answer(a_request):
        number = int("".join(str(token - 2) for token in a_request.prompt_token_ids[:-1]))
        return str(3 * number) if sample_of(a_request) % 2 else "0"

    async with runner(model_path, f"{TASKS / 'double.py'}:Double", kwargs={"factor": 3}) as group_runner:
        result = await group_runner.run_group(request(7), ScriptedPolicy(model_path, answer))
    assert result.trajectories[1].messages == [Message("user", "107="), Message("assistant", "321")]
    assert [rollout.reward for rollout in result.rollouts] == pytest.approx([0.05, 1.025, 0.05, 1.025])
    assert result.rollouts[1].reward_parts == {"exact_match": 1.0, "brief": 0.25}


class SecondThought(Rollouter):
    """Asks twice and keeps the second answer."""

    async def roll_out(self, group, sample, generate, rollout):
        if sample == 3:
            raise KeyError("a user's bug")
        await super().roll_out(group, sample, generate, rollout)
        return await super().roll_out(group, sample, generate, rollout)


async def test_a_users_rollouter_plays_its_own_way_and_its_bugs_cost_one_rollout(model_path):
    policy = ScriptedPolicy(model_path)
    async with runner(model_path, rollouter=f"{__file__}:SecondThought") as group_runner:
        result = await group_runner.run_group(request(0), policy)
    assert len(policy.requests) == 6
    assert [bool(rollout.error) for rollout in result.rollouts] == [False, False, False, True]
    assert "a user's bug" in result.rollouts[3].error


async def test_a_rollouter_that_is_none_is_refused(model_path):
    with pytest.raises(ConfigError, match="rollout.rollouter"):
        async with runner(model_path, rollouter="titan_rl.rollout.report:GroupReport"):
            pass


async def test_the_runs_seed_reaches_an_environment_that_wants_one(model_path):
    prompts = set()
    for kwargs in ({}, {"seed": 11}, {"seed": 12}):
        async with runner(model_path, kwargs=kwargs) as group_runner:
            result = await group_runner.run_group(request(0, samples=1), ScriptedPolicy(model_path))
            prompts.add(result.trajectories[0].messages[0])
    assert len(prompts) == 2  # the run's seed is 11


async def test_a_cancelled_group_leaves_no_rollout_behind(model_path):
    started = asyncio.Event()

    async def never(a_request):
        started.set()
        await asyncio.Event().wait()

    async with runner(model_path) as group_runner:
        before = rollout_tasks()
        running = asyncio.ensure_future(group_runner.run_group(request(0), never))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert rollout_tasks() == before


def rollout_tasks():
    """All tasks but those that wait for the end of a message to user code."""
    return {task for task in asyncio.all_tasks() if not task.get_name().startswith("environment ")}
