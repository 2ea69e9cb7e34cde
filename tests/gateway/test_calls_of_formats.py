"""What streams of every chat format give of a turn with calls, and when. About 10 s."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.formats import FORMATS, TOOLS, format_over_bytes

from titan_rl.chat.chat_renderer import ChatRenderer
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


def turn_of(chat: ChatRenderer, calls: tuple[ToolCall, ...]) -> list[int]:
    """As the format writes it, without what ends it."""
    before = chat.render(ASKED.messages, TOOLS)
    after = chat.render([*ASKED.messages, Message("assistant", "", calls)], TOOLS, add_generation_prompt=False)
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
    deltas = deltas_of(chat, tokens, [*range(len(tokens))] if each else cuts)
    last = deltas[-1].choice
    assert last is not None
    assert [call for delta in deltas for call in delta.calls] == [*last.message.tool_calls]
    assert "".join(delta.text for delta in deltas) == last.message.content
    assert "".join(delta.reasoning for delta in deltas) == last.message.reasoning


def test_a_call_comes_before_the_end_of_its_turn(chat: ChatRenderer) -> None:
    written = turn_of(chat, CALLS)
    thinks_first = "</think>" not in chat.decode(written)
    tokens = [*chat.encode("</think>"), *written] if thinks_first else written
    deltas = deltas_of(chat, tokens, [*range(len(tokens))])
    assert [call for delta in deltas[:-1] for call in delta.calls], chat.decode(tokens)
