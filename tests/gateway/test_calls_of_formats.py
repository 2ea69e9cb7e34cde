"""What streams of every chat format give of a turn with calls or stray marks, and when (60 s)."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.formats import EVERY_FORMAT, FORMATS, TOOLS, format_over_bytes

from titan_rl.chat.chat_renderer import ChatRenderer
from titan_rl.errors import TaskError
from titan_rl.gateway.calls import Chat, CompletionCall, Delta
from titan_rl.gateway.choices import ChoiceReader
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Message,
    Piece,
    SamplingParams,
    ToolCall,
    sampled_arrays,
)

ASKED = Chat([Message("user", "hi")], TOOLS)
CALLS = (ToolCall("add", {"terms": [1, 2]}, id="functions.add:0"),)
CALLS += (ToolCall("look_up", {"word": "x"}, id="functions.look_up:1"),)
MARKED = [name for name in FORMATS if name != "llama-3"]
"""Llama's calls are nothing but JSON."""


@pytest.fixture(scope="module", params=MARKED)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return format_over_bytes(request.param, lambda: tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="module", params=EVERY_FORMAT)
def any_format(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return format_over_bytes(request.param, lambda: tmp_path_factory.mktemp("format"))


def turn_of(chat: ChatRenderer, calls: tuple[ToolCall, ...], content: str = "", reasoning: str = "") -> list[int]:
    """As the format writes it, without what ends it."""
    before = chat.render(ASKED.messages, TOOLS)
    said = Message("assistant", content, calls, reasoning=reasoning)
    after = chat.render([*ASKED.messages, said], TOOLS, add_generation_prompt=False)
    same = next((place for place, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    return [token for token in after[same:] if token not in chat.stop_token_ids]


def deltas_of(chat: ChatRenderer, tokens: list[int], cuts: list[int]) -> list[Delta]:
    completion = Completion(
        request_id="r",
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int64),
        finish_reason=FinishReason.LENGTH,
    )
    prompt = np.array(chat.render(ASKED.messages, TOOLS), np.int32)
    request = GenerationRequest(
        request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(max_new_tokens=999), seed=0
    )
    reader = ChoiceReader(0, request, CompletionCall(id="c", prompts=[ASKED]), chat)
    places = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    pieces = [
        Piece(request_id="r", offset=start, **sampled_arrays(completion, start=start, end=end))
        for start, end in pairwise(places)
    ]
    return [delta for part in [*pieces, completion] if (delta := reader.read_next(part)) is not None]


def joined(deltas: list[Delta]) -> Message:
    """The whole turn, which the deltas together must be."""
    last = deltas[-1].choice
    assert last is not None
    assert [call for delta in deltas for call in delta.calls] == [*last.message.tool_calls]
    assert "".join(delta.text for delta in deltas) == last.message.content
    assert "".join(delta.reasoning for delta in deltas) == last.message.reasoning
    return last.message


FRAGMENTS = st.sampled_from(["two", "one", "Look: ", "1 < 2 ", "\n", "<think>", "</think>", "é"])


@settings(max_examples=60)
@given(
    fragments=st.lists(st.tuples(FRAGMENTS, st.integers(0, 200), st.booleans()), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 600), max_size=40),
    each=st.booleans(),
)
def test_the_calls_of_a_stream_are_those_of_the_whole_turn(
    chat: ChatRenderer, fragments: list[tuple[str, int, bool]], cuts: list[int], each: bool
) -> None:
    """Also where a call is cut off, or lacks a token."""
    tokens: list[int] = []
    for said, place, whole in fragments:
        calls = {"two": CALLS, "one": CALLS[:1]}.get(said)
        part = turn_of(chat, calls) if calls else chat.encode(said)
        tokens += part if whole else [*part[:place], *part[place + 1 :]] if place % 2 else part[: place // 2]
    joined(deltas_of(chat, tokens, [*range(len(tokens))] if each else cuts))


def test_a_call_comes_before_the_end_of_its_turn(chat: ChatRenderer) -> None:
    written = turn_of(chat, CALLS)
    thinks_first = "</think>" not in chat.decode(written)
    tokens = [*chat.encode("</think>"), *written] if thinks_first else written
    deltas = deltas_of(chat, tokens, [*range(len(tokens))])
    assert [call for delta in deltas[:-1] for call in delta.calls], chat.decode(tokens)


STRAY = [
    "a",
    "b ",
    " ",
    "\n",
    "é",
    "<think>",
    "</think>",
    "{",
    "}",
    "1 < 2",
    "assistant",
    "user",
    "analysis",
    "add",
    "[",
]
STRAY += ['{"name": "add", "arguments": {}}', '{"name": "add", "parameters": {}}', "commentary to=functions.add", "<|"]


def stray_turn(chat: ChatRenderer, call: list[int], chance: random.Random) -> list[int]:
    """Of words, of all the format's marks, in any order, and of pieces of a call."""
    marks = sorted(token for name, token in chat._tokenizer.get_vocab().items() if len(name) > 1)
    turn: list[int] = []
    for _ in range(chance.randint(1, 10)):
        match chance.choices(["mark", "words", "call"], [9, 9, 2])[0]:
            case "mark":
                turn.append(chance.choice(marks))
            case "words":
                turn += chat.encode(chance.choice(STRAY))
            case "call":
                start, end = sorted(chance.choices(range(len(call) + 1), k=2))
                turn += call[start:end] if chance.random() < 0.5 else call
    return [token for token in turn if token not in chat.stop_token_ids] or chat.encode("a")


def play_stray_turns(chat: ChatRenderer, count: int) -> None:
    try:
        call = turn_of(chat, CALLS)
    except TaskError:  # Llama's has one call in a turn
        call = turn_of(chat, CALLS[:1])
    for seed in range(count):
        chance = random.Random(seed)
        tokens = stray_turn(chat, call, chance)
        cuts = chance.choices(range(len(tokens)), k=3) if seed % 2 else [*range(len(tokens))]
        joined(deltas_of(chat, tokens, cuts))


def test_no_marks_in_a_turn_make_a_stream_fail(any_format: ChatRenderer) -> None:
    play_stray_turns(any_format, 25)


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_no_marks_in_a_turn_make_a_stream_fail_in_a_thousand_turns(any_format: ChatRenderer) -> None:
    play_stray_turns(any_format, 1000)


@pytest.mark.parametrize("content", ["", "Look.", "add"])
def test_a_turn_that_its_format_wrote_reads_as_its_format_reads_it(any_format: ChatRenderer, content: str) -> None:
    for calls in (CALLS[:1], ()) if content else (CALLS[:1],):
        for reasoning in ("", "hm"):
            tokens = turn_of(any_format, calls, content, reasoning)
            prompt = any_format.render(ASKED.messages, TOOLS)
            said = any_format.parse(tokens, FinishReason.LENGTH, prompt, TOOLS)
            read = joined(deltas_of(any_format, tokens, [*range(len(tokens))]))
            assert (read.content, read.reasoning) == (said.content.lstrip(), said.reasoning.rstrip())
            assert [call._replace(id="") for call in read.tool_calls] == [
                call._replace(id="") for call in said.tool_calls if not call.problem
            ]


@pytest.mark.parametrize("any_format", ["llama-3"], indirect=True)
def test_what_was_said_before_a_stray_header_stays_said(any_format: ChatRenderer) -> None:
    said = "Hi<|start_header_id|>user<|end_header_id|>\n\nyes"
    assert joined(deltas_of(any_format, any_format.encode(said), [2])).content == said


@pytest.mark.parametrize("any_format", ["glm-4.5"], indirect=True)
def test_white_space_before_the_content_is_none_of_it_with_a_call_or_without(any_format: ChatRenderer) -> None:
    said = any_format.encode("<think>hm</think>\nLook. ")
    turns = [
        joined(deltas_of(any_format, tokens, [*range(99)])) for tokens in (said, said + turn_of(any_format, CALLS))
    ]
    assert [turn.content.rstrip() for turn in turns] == ["Look.", "Look."] and len(turns[1].tool_calls) == 2
