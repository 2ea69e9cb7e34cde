"""The deltas of a completion are its content, character by character, and come as early as they can. About 5 s."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.chat import make_renderer
from titan_rl.chat.renderer import Renderer
from titan_rl.gateway.calls import ApiError, Chat, Choice, CompletionCall
from titan_rl.gateway.choices import HALF, ChoiceReader, News, StreamedText
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import (
    SAMPLED_ARRAYS,
    Completion,
    FinishReason,
    GenerationRequest,
    Message,
    Piece,
    SamplingParams,
    ToolCall,
    ToolSpec,
)

TOOL = ToolSpec("look_up", "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "é"}}\n</tool_call>'
WORDS = [
    "a",
    "b ",
    " ",
    "\n",
    "é",
    "😀",
    "€",
    "<",
    ">",
    "</",
    "[",
    "]",
    "{",
    "1 < 2",
    "List<int>",
    "<b>",
    "END",
    "EN",
    "D",
]
MARKS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "tool_call>",
    CALL,
    '{"name"',
    "STOP me",
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Qwen3's format over bytes, as an untrained policy might speak it."""
    return make_renderer("auto", make_tiny_policy(TinyPolicyConfig(tokenizer="chat"), tmp_path_factory.mktemp("chat")))


def cut_at(tokens: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    places = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    return [list(tokens[a:b]) for a, b in zip(places[:-1], places[1:], strict=True)]


def request_of(prompt: list[int], tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=tokens)
    return GenerationRequest(request_id="r", prompt_token_ids=np.array(prompt, np.int32), sampling=sampling, seed=0)


def piece_of(tokens: list[int]) -> Piece:
    zeros = np.zeros(len(tokens))
    return Piece(
        request_id="r",
        offset=0,
        token_ids=np.array(tokens, np.int32),
        logprobs=zeros.astype(np.float32),
        versions=zeros.astype(np.int64),
    )


def sampled(tokens: Sequence[int], prompt: list[int]) -> tuple[GenerationRequest, Completion]:
    completion = Completion(
        request_id="r",
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int64),
        finish_reason=FinishReason.LENGTH,
    )
    return request_of(prompt, len(tokens) + 1), completion


def whole(
    tokens: Sequence[int], renderer: Renderer, asked: Chat | str, prompt: list[int], stops: Sequence[str] = ()
) -> Choice:
    """What a client that does not stream gets."""
    request, completion = sampled(tokens, prompt)
    return ChoiceReader(0, request, CompletionCall(id="c", prompts=[asked], stop=stops), renderer).read(completion)


def chat_of(*, tools: bool) -> Chat:
    return Chat([Message("user", "hi")], [TOOL] if tools else [])


def deltas_of(renderer: Renderer, prompt: list[int], stops: Sequence[str], tools: Sequence[ToolSpec]) -> StreamedText:
    return StreamedText(
        renderer.decode,
        stops=stops,
        parse=lambda tokens, end: renderer.parse([*tokens, *end], FinishReason.LENGTH, prompt, tools),
        thought_end=renderer.encode("</think>"),
        tools=[tool.name for tool in tools],
    )


@settings(max_examples=400)
@given(
    fragments=st.lists(st.sampled_from(WORDS + MARKS) | st.text(max_size=3), max_size=14),
    cuts=st.lists(st.integers(1, 120), max_size=40),
    end=st.integers(0, 3),
    stops=st.lists(st.sampled_from(["END", "STOP", "\n", "ab", "</think>"]), max_size=2),
    tools=st.booleans(),
    thinking=st.booleans(),
)
def test_what_is_streamed_of_a_chat_is_its_content(
    chat: Renderer, fragments: list[str], cuts: list[int], end: int, stops: list[str], tools: bool, thinking: bool
) -> None:
    prompt = chat.render([Message("user", "hi")])
    said = ("<think>\nlet me see</think>\n\n" if thinking else "") + "".join(fragments)
    tokens = chat.encode(said.encode("utf-8", "ignore").decode())
    tokens = tokens[: len(tokens) - end]  # perhaps in the middle of a character
    expected = whole(tokens, chat, chat_of(tools=tools), prompt, stops)
    deltas = deltas_of(chat, prompt, stops, [TOOL] if tools else [])
    given_out = [deltas.add(piece) for piece in cut_at(tokens, cuts)]
    given_out.append(deltas.rest(expected.message))
    texts, thoughts, calls = zip(*given_out, strict=True)
    assert "".join(texts) == expected.message.content
    assert "".join(thoughts) == expected.message.reasoning
    assert sum(calls, ()) == expected.message.tool_calls
    if deltas.ended:
        assert expected.stopped and len(deltas.tokens) >= len(expected.completion.token_ids), (
            "nothing that counts is missing"
        )


@settings(max_examples=300)
@given(
    token_bytes=st.lists(st.integers(2, 257), max_size=40),
    text=st.text(max_size=8),
    cuts=st.lists(st.integers(1, 60), max_size=30),
    stops=st.lists(st.sampled_from(["a", "ab", "é", "\n", "😀!"]), max_size=2),
)
def test_what_is_streamed_of_a_text_is_that_text_also_where_it_is_no_unicode(
    chat: Renderer, token_bytes: list[int], text: str, cuts: list[int], stops: list[str]
) -> None:
    tokens = [*chat.encode(text.encode("utf-8", "ignore").decode()), *token_bytes]
    expected = whole(tokens, chat, "hi", [5], stops)
    deltas = StreamedText(chat.decode, stops=stops)
    given_out = "".join([deltas.add(piece).text for piece in cut_at(tokens, cuts)])
    assert given_out + deltas.rest(expected.message).text == expected.message.content
    assert expected.message.content.startswith(given_out)


@settings(max_examples=200)
@given(
    fragments=st.lists(st.sampled_from(WORDS + MARKS) | st.text(max_size=3), max_size=14),
    cuts=st.lists(st.integers(1, 120), max_size=40),
    tools=st.booleans(),
)
def test_thinking_goes_out_before_the_first_text_and_is_all_there_is(
    chat: Renderer, fragments: list[str], cuts: list[int], tools: bool
) -> None:
    asked = chat_of(tools=tools)
    prompt = chat.render(asked.messages, asked.tools)
    tokens = chat.encode(f"<think>\n{''.join(fragments)}".encode("utf-8", "ignore").decode())
    request, completion = sampled(tokens, prompt)
    reader = ChoiceReader(0, request, CompletionCall(id="c", prompts=[asked]), chat)
    parts: list[Piece | Completion] = []
    for piece in cut_at(tokens, cuts):
        at = parts[-1].end if parts and isinstance(parts[-1], Piece) else 0
        arrays = {name: getattr(completion, name)[at : at + len(piece)] for name in SAMPLED_ARRAYS}
        parts.append(Piece(request_id="r", offset=at, **arrays))
    deltas = [delta for part in [*parts, completion] if (delta := reader.read_next(part)) is not None]
    last = deltas[-1].choice
    assert last is not None and "".join(delta.reasoning for delta in deltas) == last.message.reasoning
    first = next((number for number, delta in enumerate(deltas) if delta.text), len(deltas))
    assert not any(delta.reasoning for delta in deltas[first + 1 :])


def streamed(renderer: Renderer, said: Sequence[str], *, stops: Sequence[str] = (), tools: bool = False) -> list[str]:
    deltas = deltas_of(renderer, renderer.render([Message("user", "hi")]), stops, [TOOL] if tools else [])
    return [deltas.add(renderer.encode(piece)).text for piece in said]


def news(renderer: Renderer, said: Sequence[str]) -> list[News]:
    """With tools, and a last one for the rest."""
    prompt = renderer.render([Message("user", "hi")])
    deltas = deltas_of(renderer, prompt, (), [TOOL])
    found = [deltas.add(renderer.encode(piece)) for piece in said]
    tokens = [token for piece in said for token in renderer.encode(piece)]
    return [*found, deltas.rest(whole(tokens, renderer, chat_of(tools=True), prompt).message)]


def test_words_come_at_once_and_white_space_with_the_next_one(chat: Renderer) -> None:
    assert streamed(chat, ["Hello", " ", "wor", "ld.\n", "\nMore"]) == ["Hello", "", " wor", "ld.", "\n\nMore"]


def test_half_a_character_waits_for_the_other_half(chat: Renderer) -> None:
    smile = chat.encode("😀")
    deltas = StreamedText(chat.decode)
    assert [deltas.add([token]).text for token in smile] == ["", "", "", "😀"]
    assert StreamedText(chat.decode).add(smile[:2]) == News()


def test_what_may_become_a_stop_text_waits(chat: Renderer) -> None:
    assert streamed(chat, ["a", "bE", "N", "ough", "EN", "D", "later"], stops=["END"]) == [
        *("a", "b", "", "ENough", "", "", "")
    ]


def test_nothing_of_a_call_is_streamed_and_text_that_is_none_is(chat: Renderer) -> None:
    assert streamed(chat, ["one ", "<", " two <b>bold</b> "], tools=True) == ["one", "", " < two <b>bold</b>"]
    assert streamed(chat, ["Look: ", "<tool", "_call>", "\n{", "}", "</tool_call>", "x"], tools=True) == [
        *("Look:", "", "", "", "", "", "")
    ]
    assert streamed(chat, ['{"name"', ": 1}"], tools=True) == ["", ""], "in some formats that is a call"
    assert streamed(chat, ['{"name"', ": 1}"]) == ['{"name"', ": 1}"]


def test_thinking_is_not_content_and_content_follows_it_at_once(chat: Renderer) -> None:
    assert streamed(chat, ["<think>", "hm", "</think>", "\n\n", "So", " it is"]) == ["", "", "", "", "So", " it is"]


def test_a_long_thought_is_not_read_again_at_every_token(chat: Renderer) -> None:
    reads = 0

    def parse(tokens: Sequence[int], end: Sequence[int]) -> Message:
        nonlocal reads
        reads += 1
        return chat.parse([*tokens, *end], FinishReason.LENGTH)

    deltas = StreamedText(chat.decode, parse=parse, thought_end=chat.encode("</think>"))
    deltas.add(chat.encode("<think>"))
    for token in chat.encode("x" * 5000):
        assert deltas.add([token]) == News(reasoning="x"), "it is read as it comes"
    assert reads < 400
    said = [deltas.add([token]).text for token in chat.encode("</think>\n\nyes")]
    assert "".join(said[-3:]) == "yes", "no token of the answer waits"


def test_each_token_costs_the_decoding_of_a_few(chat: Renderer) -> None:
    decoded = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return chat.decode(tokens)

    text = StreamedText(decode)
    for token in (tokens := chat.encode("é😀 word " * 200)):
        text.add([token])
    assert text.sure == "é😀 word " * 200 and not text.sure.endswith(HALF)
    assert decoded < 12 * len(tokens)


def test_a_turn_that_reads_otherwise_in_the_end_is_an_error_and_not_another_text(chat: Renderer) -> None:
    deltas = deltas_of(chat, [], [], [])
    deltas.add(chat.encode("one"))
    with pytest.raises(ApiError, match="reads otherwise than what was streamed"):
        deltas.rest(Message("assistant", "two"))


def test_thinking_comes_as_it_is_sampled_without_white_space_around_it(chat: Renderer) -> None:
    said = news(chat, ["<think>", "\n", "hm", " so", "\n", "</think>", "\n\nyes"])
    assert [each.reasoning for each in said] == ["", "", "hm", " so", "", "", "", ""]
    assert said[6].text == "yes"
    cut = news(chat, ["<think>\n", "hm", " 1 < 2", " <tool", "_call>", " or"])
    assert [each.reasoning for each in cut] == ["", "hm", " 1 < 2", "", "", "", " <tool_call> or"], (
        "what may close it waits"
    )


@pytest.mark.parametrize("thought", ["j<tool_call>b<|im_start|>c", "j<tool_call>b</tool_call>c<tool_call>d"])
@pytest.mark.parametrize("tools", [False, True])
def test_marks_in_a_thought_are_part_of_it_and_nothing_behind_them_is_content(chat: Renderer, thought, tools) -> None:
    asked = chat_of(tools=tools)
    prompt = chat.render(asked.messages, asked.tools)
    tokens = [*chat.encode(f"<think>{thought}</think>\n\n{{}}"), chat.stop_token_ids[0]]
    said = whole(tokens, chat, asked, prompt).message
    assert (said.content, said.reasoning) == ("{}", thought)


def test_a_call_comes_when_it_is_closed_and_not_when_it_may_turn_out_to_be_none(chat: Renderer) -> None:
    wrong = CALL.replace('"name": ', "")
    said = news(chat, ["Look:", CALL[:30], CALL[30:-12], "</tool_call>", "\n", wrong, CALL, "x"])
    call = ToolCall("look_up", {"word": "é"})
    assert [each.calls for each in said] == [(), (), (), (call,), (), (), (call,), (), ()]
    assert said[0].text == "Look:" and '"look_up"' in said[-1].text, "what is none is content"
    thought = news(chat, ["<think>", "perhaps ", CALL, "</think>", "no"])
    assert all(each.calls == () for each in thought) and thought[-1].text == "no"
    assert [each.calls for each in news(chat, ["<think>", "so", CALL])] == [(), (), (), (call,)], "only the end tells"


def test_what_comes_with_the_end_of_a_stop_text_is_not_lost(chat: Renderer) -> None:
    prompt = chat.render([Message("user", "hi")])
    request = request_of(prompt, 40)
    call = CompletionCall(id="c", prompts=[chat_of(tools=False)], stop=["END"])
    reader = ChoiceReader(0, request, call, chat)
    delta = reader.read_next(piece_of(chat.encode("<think>hm</think>one two ENDless")))
    assert delta is not None and (delta.reasoning, delta.text) == ("hm", "one two ")
