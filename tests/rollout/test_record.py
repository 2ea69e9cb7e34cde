"""What is recorded of a step, and that a record says what the samples say (2 s)."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_token_graph import graph_of

from titan_rl.observability.conversation import draw_rollout
from titan_rl.policy.kept_tokens import TokenScores
from titan_rl.rollout.record import choose, conversation, record, shortest, token_texts, transcript
from titan_rl.rollout.report import GroupReport, GroupResult, Rollout, report_of
from titan_rl.rollout.samples import training_samples
from titan_rl.types import (
    GroupRequest,
    Message,
    PolicyVersion,
    Purpose,
    SamplingParams,
    StopReason,
    ToolCall,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
REWARDS = st.lists(st.lists(st.one_of(st.none(), st.floats(-2, 2)), min_size=2, max_size=4), min_size=1, max_size=5)
"""Of groups; None: the rollout failed."""


def reported(group_id: int, rewards: list[float | None]) -> GroupReport:
    asked = GroupRequest(
        group_id=group_id,
        purpose=Purpose.TRAIN,
        samples=len(rewards),
        sampling=SamplingParams(max_new_tokens=1),
        min_version=PolicyVersion(0, 0),
    )
    rollouts = tuple(
        Rollout(sample=sample, reward=reward or 0.0, error="" if reward is not None else "it raised")
        for sample, reward in enumerate(rewards)
    )
    return report_of(asked, GroupResult(group_id=group_id, purpose=Purpose.TRAIN, rollouts=rollouts, samples=()), ())


@given(REWARDS, st.integers(0, 3), st.integers(1, 50))
def test_the_best_the_worst_and_random_ones_are_chosen_and_always_the_same(
    rewards: list[list[float | None]], each: int, step: int
) -> None:
    reports = [reported(group_id, group) for group_id, group in enumerate(rewards)]
    chosen = choose(step, reports, each)
    assert chosen == choose(step, reports, each)
    assert len({one.name for one in chosen}) == len(chosen), "one line of each"
    graded = sorted(reward for group in rewards for reward in group if reward is not None)
    count = min(each, len(graded))

    def kept(why: str) -> list[float]:
        return sorted(one.rollout.reward for one in chosen if why in one.kept)

    assert kept("best") == graded[len(graded) - count :] and kept("worst") == graded[:count]
    assert not any(one.rollout.error for one in chosen if {"best", "worst"} & {*one.kept})
    assert len(kept("random")) == min(each, sum(map(len, rewards)))


def test_another_step_draws_other_random_rollouts() -> None:
    reports = [reported(group_id, [0.0, 1.0]) for group_id in range(50)]
    drawn = {step: [one.name for one in choose(step, reports, 1) if "random" in one.kept] for step in range(1, 6)}
    assert len(set(map(str, drawn.values()))) > 1


@given(st.data())
def test_a_record_says_what_the_samples_and_the_trainer_say(data: st.DataObject) -> None:
    turns = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]), ([1, 9], [8, 8])][: data.draw(st.integers(1, 3))]
    rollout = Rollout(sample=1, graph=graph_of(*turns), reward=0.5, stop_reason=StopReason.STOP, seeds=(7, 8, 9))
    samples = training_samples(3, [rollout], [0.25], rollouts=2)
    result = GroupResult(group_id=3, purpose=Purpose.TRAIN, rollouts=(rollout,), samples=samples)
    scores = {}
    for sample in samples:
        count = int(sample.loss_mask.sum())
        drawn = [data.draw(st.lists(FLOATS, min_size=count, max_size=count)) for _ in range(2)]
        scores[3, sample.sample] = TokenScores(*(np.array(values, np.float32) for values in drawn))
    (chosen,) = [each for each in choose(1, [reported(3, [None, 0.5])], 1) if "best" in each.kept]

    said = conversation(result, 1, lambda ids: "".join(map(chr, ids)), rollouts=2)
    line: dict[str, Any] = json.loads(json.dumps(record(4, chosen, said, scores), allow_nan=False))

    assert (line["step"], line["group"], line["sample"], line["reward"]) == (4, 3, 1, 0.5)
    assert line["advantage"] == 0.25 and [turn["seed"] for turn in line["turns"]] == [7, 8, 9][: len(turns)]
    assert [branch["sample"] for branch in line["branches"]] == [sample.sample for sample in samples]
    for branch, sample in zip(line["branches"], samples, strict=True):
        mask = sample.loss_mask
        assert branch["token_ids"] == sample.token_ids.tolist()
        assert {len(values) for name, values in branch.items() if name != "sample"} == {len(mask)}
        assert branch["trained"] == mask.astype(int).tolist()
        assert [value is not None for value in branch["logprobs"]] == mask.tolist()
        assert [bool(version) for version in branch["versions"]] == mask.tolist()
        theirs = scores[3, sample.sample]
        for name, wanted in (("trainer_logprobs", theirs.logprobs), ("weights", theirs.weights)):
            found = [value for value, trained in zip(branch[name], mask, strict=True) if trained]
            assert np.array(found, np.float32).tobytes() == wanted.tobytes()


def test_a_group_that_was_finished_before_a_resume_is_recorded_by_its_tokens() -> None:
    samples = training_samples(3, [Rollout(sample=1, graph=graph_of(([1], [2])))], [0.25], rollouts=2)
    result = GroupResult(group_id=3, purpose=Purpose.TRAIN, rollouts=(), samples=samples)
    said = conversation(result, 1, str, rollouts=2)
    assert said["messages"] == said["turns"] == [] and said["branches"][0]["token_ids"] == [1, 2]


def test_tool_calls_are_plain_and_numbers_that_json_lacks_are_text() -> None:
    call = ToolCall("add", {"a": math.nan, "b": 2}, raw="add(NaN, 2)")
    messages = (
        Message("user", "2+"),
        Message("assistant", "", (call,), reasoning="hm"),
        Message("tool", "4", name="add"),
    )
    side = ((Message("user", "before"),),)
    rollout = Rollout(sample=0, messages=messages, side_conversations=side, graph=graph_of(([1], [2])), seeds=(1,))
    result = GroupResult(group_id=0, purpose=Purpose.EVALUATE, rollouts=(rollout,), samples=())
    said = conversation(result, 0, str, rollouts=1)
    assert json.loads(json.dumps(said["messages"], allow_nan=False)) == [
        {"role": "user", "content": "2+"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "hm",
            "tool_calls": [{"name": "add", "arguments": {"a": "NaN", "b": 2}, "raw": "add(NaN, 2)"}],
        },
        {"role": "tool", "content": "4", "name": "add"},
    ]
    (chosen,) = [each for each in choose(1, [reported(0, [1.0, None])], 1) if "best" in each.kept]
    line = record(0, chosen, said, {}) | {"kept": ["right"]}
    assert line["side_conversations"] == [[{"role": "user", "content": "before"}]]
    drawn = draw_rollout(line).plain
    assert re.search(r"conversation 1 of 2\nuser +before\nconversation 2 of 2 \(graded\)\nuser +2\+", drawn)
    assert transcript(line) == "right  '2+' → 'assistant: hm add(NaN, 2)  tool: 4', reward 1.000"


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
