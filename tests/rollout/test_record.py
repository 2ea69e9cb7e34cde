"""What is recorded of a step, and that a record says what the samples say (2 s)."""

from __future__ import annotations

import json
import math
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_samples import completion, turn_of

from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef
from titan_rl.loop.recording import choose
from titan_rl.metrics.rollout_record import RolloutRecord, read_record, to_line
from titan_rl.policy.token_score_recorder import TokenScores
from titan_rl.rollout.report import (
    GroupReport,
    GroupResult,
    report_of,
    shortest,
    token_texts,
    with_numbers,
    with_scores,
)
from titan_rl.rollout.samples import training_samples
from titan_rl.rollout.trajectory import RolloutRequest, Trajectory
from titan_rl.types import GroupRequest, Message, PolicyVersion, Purpose, SamplingParams, StopReason, ToolCall
from titan_rl.view.conversation import draw_rollout, transcript

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
REWARDS = st.lists(st.lists(st.one_of(st.none(), st.floats(-2, 2)), min_size=2, max_size=4), min_size=1, max_size=5)
"""Of groups; None: the rollout failed."""


def asked(group_id: int, samples: int, purpose: Purpose = Purpose.TRAIN) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        purpose=purpose,
        samples=samples,
        sampling=SamplingParams(max_new_tokens=1),
        min_version=PolicyVersion(0, 0),
    )


def reported(group_id: int, rewards: list[float | None]) -> GroupReport:
    rollouts = tuple(
        RolloutRecord(
            purpose=Purpose.TRAIN,
            group=group_id,
            sample=sample,
            reward=reward or 0.0,
            error="" if reward is not None else "it raised",
        )
        for sample, reward in enumerate(rewards)
    )
    return report_of(asked(group_id, len(rewards)), GroupResult(rollouts=rollouts), ())


def played(group: GroupRequest, sample: int, *turns: tuple[list[int], list[int]]) -> Trajectory:
    limits = {"session_id": "s", "max_turns": 9, "max_sampled_tokens": 0}
    trajectory = Trajectory(RolloutRequest(group=group, sample=sample, **limits), None, run_seed=0, max_model_len=0)
    trajectory.turns = [
        turn_of(prompt, completion(tokens), seed=seed, advantage=0.25) for seed, (prompt, tokens) in enumerate(turns, 7)
    ]
    return trajectory


def result_of(
    group: GroupRequest, *trajectories: Trajectory, reward: float = 0.5, trained: bool = False
) -> GroupResult:
    each = [(one.request.sample, reward, one.tree) for one in trajectories]
    return GroupResult(
        rollouts=tuple(
            with_numbers(RolloutRecord(purpose=group.purpose, group=group.group_id, sample=at, reward=reward), one)
            for at, one in ((each.request.sample, each) for each in trajectories)
        ),
        trajectories=trajectories,
        samples=training_samples(group.group_id, each, rollouts=group.samples) if trained else (),
    )


NUMBERED = st.builds(
    RolloutRecord,
    purpose=st.just(Purpose.EVALUATE),
    group=st.just(7),
    attempt=st.just(2),
    sample=st.integers(0, 9),
    reward=FLOATS,
    reward_parts=st.dictionaries(st.sampled_from(["a", "exact_match"]), FLOATS),
    stop_reason=st.sampled_from(StopReason),
    error=st.text(max_size=3),
    truncated=st.booleans(),
    turn_count=st.integers(0, 2**40),
    metrics=st.dictionaries(st.sampled_from(["generation/preemptions", "generation/kv_use", "of a user"]), FLOATS),
)


@given(st.lists(NUMBERED, max_size=4))
def test_a_report_comes_through_a_message_as_it_was(rollouts: list[RolloutRecord]) -> None:
    numbered = enumerate(rollouts)
    report = GroupReport(
        group_id=7,
        purpose=Purpose.EVALUATE,
        attempt=2,
        rollouts=tuple(rollouts),
        samples=SampleBatch.of(
            [SampleRef("a", at, 7, at, 9, 4, each.reward, 3, "f", 8, at, 0.5) for at, each in numbered]
        ),
        restarts=3,
    )
    assert repr(pickle.loads(pickle.dumps(report))) == repr(report)


def test_a_report_can_be_sent_whatever_its_error_says() -> None:
    result = result_of(asked(1, 1), played(asked(1, 1), 0, ([1], [2])))
    failed = replace(result, rollouts=tuple(structs.replace(each, error="\ud83d!") for each in result.rollouts))
    report = report_of(asked(1, 1), failed, ())
    assert pickle.loads(pickle.dumps(report)).first_error == "task: ?!"


@given(REWARDS, st.integers(0, 3), st.integers(1, 50))
def test_the_best_the_worst_and_random_ones_are_chosen_and_always_the_same(
    rewards: list[list[float | None]], each: int, step: int
) -> None:
    reports = [reported(group_id, group) for group_id, group in enumerate(rewards)]
    chosen = choose(step, reports, each)
    assert chosen == choose(step, reports, each)
    assert len({(one.group, one.sample) for one in chosen}) == len(chosen), "one line of each"
    assert all(one.step == step for one in chosen)
    graded = sorted(reward for group in rewards for reward in group if reward is not None)
    count = min(each, len(graded))

    def kept(why: str) -> list[float]:
        return sorted(one.reward for one in chosen if why in one.kept)

    assert kept("best") == graded[len(graded) - count :] and kept("worst") == graded[:count]
    assert not any(one.error for one in chosen if {"best", "worst"} & {*one.kept})
    assert len(kept("random")) == min(each, sum(map(len, rewards)))


def test_another_step_draws_other_random_rollouts() -> None:
    reports = [reported(group_id, [0.0, 1.0]) for group_id in range(50)]
    drawn = {step: [one.group for one in choose(step, reports, 1) if "random" in one.kept] for step in range(1, 6)}
    assert len(set(map(str, drawn.values()))) > 1


@given(st.data())
def test_a_record_says_what_the_samples_and_the_trainer_say(data: st.DataObject) -> None:
    turns = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]), ([1, 9], [8, 8])][: data.draw(st.integers(1, 3))]
    group = asked(3, 2)
    result = result_of(group, played(group, 1, *turns), trained=True)
    scores = {}
    for sample in result.samples:
        count = int(sample.loss_mask.sum())
        drawn = [data.draw(st.lists(FLOATS, min_size=count, max_size=count)) for _ in range(2)]
        scores[3, sample.sample] = TokenScores(*(np.array(values, np.float32) for values in drawn))
    (chosen,) = choose(4, [report_of(group, result, ())], 1)

    described = result.describe(chosen, lambda ids: "".join(map(chr, ids)), count=2)
    record = with_scores(described, scores)
    line: dict[str, Any] = json.loads(to_line(record))
    assert read_record(line) == record

    assert (line["step"], line["group"], line["sample"], line["reward"]) == (4, 3, 1, 0.5)
    assert line["advantage"] == 0.25 and [turn["seed"] for turn in line["turns"]] == [7, 8, 9][: len(turns)]
    assert [branch["sample"] for branch in line["branches"]] == [sample.sample for sample in result.samples]
    for branch, sample in zip(line["branches"], result.samples, strict=True):
        mask = sample.loss_mask
        assert branch["token_ids"] == sample.token_ids.tolist()
        assert {len(values) for name, values in branch.items() if name != "sample" and values is not None} == {
            len(mask)
        }
        assert branch["trained"] == mask.astype(int).tolist()
        assert [value is not None for value in branch["logprobs"]] == mask.tolist()
        assert [bool(version) for version in branch["versions"]] == mask.tolist()
        theirs = scores[3, sample.sample]
        for name, wanted in (("trainer_logprobs", theirs.logprobs), ("weights", theirs.weights)):
            found = [value for value, trained in zip(branch[name], mask, strict=True) if trained]
            assert np.array(found, np.float32).tobytes() == wanted.tobytes()


def test_a_group_that_was_finished_before_a_resume_is_recorded_by_its_tokens() -> None:
    group = asked(3, 2)
    result = result_of(group, played(group, 1, ([1], [2])), trained=True)
    restored = GroupResult(samples=result.samples)
    described = restored.describe(result.rollouts[0], str, count=2)
    assert described.messages == described.turns == [] and described.branches[0].token_ids == [1, 2]
    assert (described.reward, described.advantage) == (0.5, 0.25)


def test_null_is_read_as_not_finite_and_what_is_no_record_is_refused() -> None:
    branch = {"sample": 1, "token_ids": [1, 2], "texts": ["a", "b"], "trained": [0, 1], "logprobs": [None, -1.0]}
    line = {"step": 4, "purpose": "train", "group": 3, "sample": 1, "reward": None, "branches": [branch]}
    record = read_record(line | {"reward_parts": {"right": None}, "exact_match": 0.0, "unheard": 1})
    assert math.isnan(record.reward) and math.isnan(record.reward_parts["right"]) and record.branches[0].weights is None
    with pytest.raises(ValueError, match="group"):
        read_record(line | {"reward_parts": {}, "group": "three"})


def test_tool_calls_are_plain_and_numbers_that_json_lacks_are_text() -> None:
    call = ToolCall("add", {"a": math.nan, "b": 2}, raw="add(NaN, 2)")
    messages = (
        Message("user", "2+"),
        Message("assistant", "", (call,), reasoning="hm"),
        Message("tool", "4", name="add"),
    )
    group = asked(0, 1, Purpose.EVALUATE)
    trajectory = played(group, 0, ([1], [2]))
    trajectory.messages, trajectory.side_conversations = [*messages], [(Message("user", "before"),)]
    result = result_of(group, trajectory, reward=1.0)
    record = structs.replace(result.describe(result.rollouts[0], str, count=1), kept=("right",))
    assert json.loads(to_line(record))["messages"] == [
        {"role": "user", "content": "2+"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "hm",
            "tool_calls": [{"name": "add", "arguments": {"a": "NaN", "b": 2}, "raw": "add(NaN, 2)"}],
        },
        {"role": "tool", "content": "4", "name": "add"},
    ]
    assert record.side_conversations == [[{"role": "user", "content": "before"}]]
    drawn = draw_rollout(record).plain
    assert re.search(r"conversation 1 of 2\nuser +before\nconversation 2 of 2 \(graded\)\nuser +2\+", drawn)
    assert transcript(record) == "right  '2+' → 'assistant: hm add(NaN, 2)  tool: 4', reward 1.000"


@given(st.lists(st.floats(width=32)))
def test_a_float32_reads_back_bit_for_bit(values: list[float]) -> None:
    array = np.array(values, np.float32)
    text = json.dumps(shortest(array), allow_nan=False)
    back = np.array([np.nan if value is None else value for value in json.loads(text)], np.float32)
    finite = np.isfinite(array)
    assert back[finite].tobytes() == array[finite].tobytes() and np.isnan(back[~finite]).all()


@given(st.text(alphabet="aé€😀"))
def test_the_texts_of_tokens_joined_are_the_decoded_text(text: str) -> None:
    tokens = text.encode()  # of one byte each
    texts = token_texts([*tokens], lambda ids: bytes(ids).decode(errors="replace"))
    assert len(texts) == len(tokens) and "".join(texts) == text
