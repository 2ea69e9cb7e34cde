"""Demonstrations from user code to training samples, through the environment's process (6 s)."""

from pathlib import Path

import pytest
from support.rollouts import TASKS, runner

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.errors import TaskError
from titan_rl.importing import import_file
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import EOS_ID, make_tiny_policy
from titan_rl.types import NO_VERSION, GroupRequest, PolicyVersion, Purpose, SamplingParams

SORT = Path(__file__).resolve().parents[2] / "rl_configs" / "sort.py"
SHOWN = f"{TASKS / 'shown.py'}:Shown"


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return make_tiny_policy(TinyPolicyConfig(symbols="abcdefghij="), tmp_path_factory.mktemp("tiny"))


def demonstrations(group_id: int, samples: int) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        purpose=Purpose.DEMONSTRATE,
        samples=samples,
        sampling=SamplingParams(max_new_tokens=1),
        min_version=PolicyVersion(0, 0),
    )


async def nothing_is_sampled(request):
    raise AssertionError("a demonstration is no request")


async def test_a_group_is_the_next_demonstrations_of_the_stream(letters):
    async with runner(letters, f"{SORT}:Sort") as group_runner:
        groups = [await group_runner.run_group(demonstrations(group, 5), nothing_is_sampled) for group in range(3)]
    renderer = SymbolRenderer(letters)
    task = import_file(SORT).Sort(seed=11)  # the run's seed
    samples = [sample for group in groups for sample in group.samples]
    assert [(sample.group_id, sample.sample) for sample in samples] == [(g, s) for g in range(3) for s in range(5)]
    for number, sample in enumerate(samples):
        shown = task.demonstration(number)
        prompt = renderer.render(shown.prompt)
        answer = renderer.render(shown.messages)
        assert answer[-1] == EOS_ID
        assert sample.token_ids.tolist() == [*prompt, *answer]
        assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * len(answer)
        assert not sample.logprobs.any() and (sample.versions == NO_VERSION).all()
    assert all(group.rollouts == () for group in groups)


async def test_only_the_policys_turns_are_taught(model_path):
    async with runner(model_path, SHOWN) as group_runner:
        result = await group_runner.run_group(demonstrations(1, 2), nothing_is_sampled)
    ids = {symbol: number + 2 for number, symbol in enumerate("0123456789=")} | {"$": EOS_ID}
    for sample, number in zip(result.samples, (2, 3), strict=True):
        assert sample.token_ids.tolist() == [ids[symbol] for symbol in f"{number}={number}$78=99$"]
        assert sample.loss_mask.tolist() == [symbol == "1" for symbol in "0011000111"]


async def test_pairs_are_two_samples_with_signs_side_by_side(model_path):
    rows = [{"prompt": f"{number}=", "answer": number, "rejected": f"{number}0"} for number in range(5)]
    kwargs = {"path": rows, "rejected": "rejected"}
    async with runner(model_path, "dataset", kwargs=kwargs, dpo_beta=0.1) as group_runner:
        result = await group_runner.run_group(demonstrations(0, 3), nothing_is_sampled)
    assert [sample.sample for sample in result.samples] == [0, 1, 2, 3, 4, 5]
    for chosen, rejected in zip(result.samples[::2], result.samples[1::2], strict=True):
        asked = (~chosen.loss_mask).sum()
        assert chosen.token_ids[: asked + 1].tolist() == rejected.token_ids[: asked + 1].tolist()
        assert len(rejected.token_ids) == len(chosen.token_ids) + 1
        assert (chosen.advantages == chosen.loss_mask).all() and (
            rejected.advantages == -1.0 * rejected.loss_mask
        ).all()
    async with runner(model_path, SHOWN, dpo_beta=0.1) as group_runner:
        with pytest.raises(TaskError, match="demonstration 0 has nothing rejected"):
            await group_runner.run_group(demonstrations(0, 1), nothing_is_sampled)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ("raises", "no demonstration today"),
        ("type", "expected Demonstration"),
        ("silent", "assistant"),
        ("unknown symbol", "é"),
    ],
)
async def test_a_demonstration_that_goes_wrong_fails_its_group_by_name(model_path, wrong, word):
    async with runner(model_path, SHOWN, kwargs={"wrong": wrong}) as group_runner:
        with pytest.raises(TaskError, match=word):
            await group_runner.run_group(demonstrations(0, 4), nothing_is_sampled)
        assert len((await group_runner.run_group(demonstrations(1, 4), nothing_is_sampled)).samples) == 4


async def test_a_demonstration_that_is_too_long_is_refused_by_its_number(model_path):
    async with runner(model_path, SHOWN, max_model_len=8) as group_runner:
        with pytest.raises(TaskError, match="demonstration 0 has 10 tokens"):
            await group_runner.run_group(demonstrations(0, 1), nothing_is_sampled)
