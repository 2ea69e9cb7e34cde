"""Four dialects tell one conversation: what is read of a body, and what of an answer that comes back. About 10 s."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.dialects import DIALECTS, Anthropic, Chats, Dialect, Gemini, Responses, chat_of
from support.gateway import MODEL

from titan_rl.chat import make_renderer
from titan_rl.chat.renderer import AnswerForm, Renderer
from titan_rl.gateway.answers import Answer
from titan_rl.gateway.anthropic import MessageAnswer, MessagesRequest
from titan_rl.gateway.calls import ApiError, Choice, Delta, ServedPolicy
from titan_rl.gateway.gemini import ContentAnswer, GenerateContentRequest
from titan_rl.gateway.openai_protocol import ChatCompletionRequest
from titan_rl.gateway.openai_routes import ChatAnswer
from titan_rl.gateway.responses import ResponseAnswer, ResponsesRequest
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import Completion, FinishReason, Message, ToolCall, ToolSpec

LOOK = ToolSpec("look_up", "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})
ADD = ToolSpec("add", "", {"type": "object", "properties": {"terms": {"type": "array", "items": {"type": "integer"}}}})
EVERY = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Qwen3's format over bytes."""
    return make_renderer("auto", make_tiny_policy(TinyPolicyConfig(tokenizer="chat"), tmp_path_factory.mktemp("chat")))


# What is told.

WORDS = st.text(min_size=1, max_size=8)
VALUES = st.recursive(st.integers(-9, 9) | st.booleans() | WORDS, lambda each: st.lists(each, max_size=2), max_leaves=3)
ARGUMENTS = st.dictionaries(WORDS, VALUES, max_size=2)


@st.composite
def turns(draw: st.DrawFn, first_id: int = 0) -> Message:
    names = draw(st.lists(st.sampled_from([LOOK.name, ADD.name]), max_size=3))
    calls = tuple(ToolCall(name, draw(ARGUMENTS), id=f"call-{first_id + each}") for each, name in enumerate(names))
    return Message("assistant", draw(WORDS | st.just("")), calls, reasoning=draw(WORDS | st.just("")))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = []
    for _ in range(draw(st.integers(0, 3))):
        messages.append(Message("user", draw(WORDS)))
        for _ in range(draw(st.integers(1, 3))):
            messages.append(turn := draw(turns(len(messages) * 10)))
            messages += [Message("tool", draw(WORDS), tool_call_id=call.id) for call in turn.tool_calls]
            if not turn.tool_calls:
                break
    return [*messages, Message("user", draw(WORDS))]


@settings(max_examples=150)
@given(conversation=conversations(), system=WORDS | st.just(""), tools=st.sampled_from([[], [LOOK], [ADD, LOOK]]))
def test_a_conversation_told_in_any_dialect_is_the_same_one(
    chat: Renderer, conversation: list[Message], system: str, tools: list[ToolSpec]
) -> None:
    asked = [Message("system", system), *conversation] if system else conversation
    for dialect in DIALECTS.values():
        read = chat_of(dialect, dialect.body(dialect.entries(conversation), system, tools))
        assert (list(read.messages), list(read.tools)) == (asked, tools), dialect
        assert chat.render(read.messages, read.tools) == chat.render(asked, tools)


def delta_of(turn: Message) -> Delta:
    nothing = {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}
    completion = Completion(request_id="r", versions=np.zeros(0, np.int64), finish_reason=FinishReason.STOP, **nothing)
    choice = Choice(completion=completion, message=turn, stopped=True)
    empty: list = []
    return Delta(
        index=0,
        first=True,
        prompt=[1],
        reasoning=turn.reasoning,
        text=turn.content,
        calls=turn.tool_calls,
        first_call=0,
        tokens=empty,
        logprobs=empty,
        choice=choice,
    )


def answer_in(dialect: Dialect, renderer: Renderer) -> Answer:
    body = dialect.body(dialect.entries([Message("user", "hi")]), tools=[LOOK, ADD])
    match dialect:
        case Chats():
            policy = ServedPolicy(name=MODEL, renderer=renderer, max_model_len=100)
            return ChatAnswer(ChatCompletionRequest.model_validate(body), policy)
        case Responses():
            return ResponseAnswer(ResponsesRequest.model_validate(body), [], MODEL, lambda *stored: None)
        case Anthropic():
            return MessageAnswer(MessagesRequest.model_validate(body), MODEL)
        case Gemini():
            return ContentAnswer(GenerateContentRequest.model_validate(body), MODEL)


@settings(max_examples=150)
@given(turn=turns())
def test_an_answer_that_comes_back_is_the_turn_that_it_was(chat: Renderer, turn: Message) -> None:
    for dialect in DIALECTS.values():
        kept = dialect.answer(json.loads(json.dumps(answer_in(dialect, chat).whole([delta_of(turn)]))))
        body = dialect.body([*dialect.entries([Message("user", "hi")]), *kept.said])
        assert chat_of(dialect, body).messages[1:] == [turn], dialect


@pytest.mark.parametrize("name", ["chat", "responses", "anthropic"])
def test_the_id_and_name_of_a_call_come_before_its_arguments(chat: Renderer, name: str) -> None:
    calls = (ToolCall("look", {"word": "x"}, id="call-1"), ToolCall("add", {"terms": [1]}, id="call-2"))
    answer, said = answer_in(DIALECTS[name], chat), delta_of(Message("assistant", "", calls))
    events = [json.dumps(event) for event in answer.events(said)]
    told = [json.dumps(json.dumps(call.arguments)) for call in calls]
    first = [
        next(place for place, event in enumerate(events) if text in event)
        for text in ("call-1", told[0], "call-2", told[1])
    ]
    assert first == sorted({*first}), "each in an event of its own"
    assert all(call.name in events[place] for call, place in zip(calls, first[::2], strict=True))


@EVERY
def test_each_piece_of_a_text_is_an_event_of_its_own(chat: Renderer, dialect: Dialect) -> None:
    answer, last = answer_in(dialect, chat), delta_of(Message("assistant", "one two three"))
    pieces = [replace(last, text="one", choice=None), replace(last, first=False, text=" two", choice=None)]
    events = [json.dumps(event) for each in pieces for event in answer.events(each)]
    assert [sum(f'"{text}"' in event for event in events) for text in ("one", " two")] == [1, 1]
    ends = [json.dumps(event) for event in answer.events(replace(last, first=False, text=" three"))]
    assert sum('" three"' in event for event in ends) == 1


@EVERY
def test_a_call_is_an_event_before_the_answer_ends(chat: Renderer, dialect: Dialect) -> None:
    call = ToolCall("add", {"terms": [7]}, id="call-1")
    answer, last = answer_in(dialect, chat), delta_of(Message("assistant", "", (call,)))
    more = replace(last, first=False, calls=[call._replace(id="call-2")], first_call=1)
    begun, ended = [json.dumps(list(answer.events(each))) for each in (replace(last, choice=None), more)]
    assert "call-1" in begun and "call-2" in ended


@EVERY
def test_the_limit_of_an_answer_is_called_as_the_dialect_calls_it_also_where_none_is_given(dialect: Dialect) -> None:
    body = dialect.body(dialect.entries([Message("user", "hi")]))
    known = {"chat": "max_tokens", "responses": "max_output_tokens", "anthropic": "max_tokens"}
    (name,) = (name for name, each in DIALECTS.items() if each is dialect)
    assert dialect.call(body).names["max_new_tokens"] == known.get(name, "generationConfig.maxOutputTokens")


def test_fields_of_google_are_read_in_both_cases_and_unknown_ones_refused() -> None:
    def read(**thinking: object) -> GenerateContentRequest:
        config = {"thinking_config": thinking}
        told = {"contents": [{"parts": [{"text": "hi"}]}], "generation_config": config}
        return GenerateContentRequest.model_validate(told)

    for name in ("include_thoughts", "includeThoughts"):
        assert read(**{name: True}).generation_config.thinking_config.include_thoughts
    assert not read(thinkingBudget=9).generation_config.thinking_config.include_thoughts
    with pytest.raises(ValidationError, match=r"thinkingConfig\.bogus|thinking_config\.bogus"):
        read(bogus=True)


# What must be answered.

FORCED = {
    "chat": {"tool_choice": "required", "parallel_tool_calls": False},
    "responses": {"tool_choice": "required", "parallel_tool_calls": False},
    "anthropic": {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
}
NAMED = {
    "chat": {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    "responses": {"tool_choice": {"type": "function", "name": "add"}},
    "anthropic": {"tool_choice": {"type": "tool", "name": "add"}},
    "gemini": {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}}},
}
ALLOWED = {
    "responses": {
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    },
    "gemini": {"toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["add"]}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMED = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "gemini": {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}},
}
NONE = {
    "chat": {"tool_choice": "none"},
    "responses": {"tool_choice": "none"},
    "anthropic": {"tool_choice": {"type": "none"}},
    "gemini": {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
}
ANY_OBJECT = {
    "chat": {"response_format": {"type": "json_object"}},
    "responses": {"text": {"format": {"type": "json_object"}}},
    "gemini": {"generationConfig": {"responseMimeType": "application/json"}},
}


def call_of(name: str, **options: object):
    dialect = DIALECTS[name]
    return dialect.call(dialect.body(dialect.entries([Message("user", "hi")]), tools=[LOOK, ADD], **options))


@pytest.mark.parametrize(
    ("told", "form"),
    [
        (FORCED, AnswerForm(None, [LOOK, ADD], parallel=False, must_call=True)),
        (NAMED, AnswerForm(None, [ADD], parallel=True, must_call=True)),
        (ALLOWED, AnswerForm(None, [ADD], parallel=True, must_call=False)),
        (FORMED, AnswerForm(SCHEMA, [LOOK, ADD], parallel=True, must_call=False)),
        (ANY_OBJECT, AnswerForm({"type": "object"}, [LOOK, ADD], parallel=True, must_call=False)),
    ],
    ids=["forced", "named", "allowed", "schema", "object"],
)
def test_what_an_answer_must_be_is_the_same_in_every_dialect(told: dict, form: AnswerForm) -> None:
    for name, options in told.items():
        assert call_of(name, **options).answer == form, name


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    for name, options in NONE.items():
        call = call_of(name, **options)
        assert (call.prompts[0].tools, call.answer) == ([], None), name


@pytest.mark.parametrize("name", ["responses", "anthropic", "gemini"])
def test_a_tool_that_is_forced_and_not_there_is_refused(name: str) -> None:
    options = json.loads(json.dumps(NAMED[name]).replace("add", "fly"))
    with pytest.raises(ApiError, match="there is no tool 'fly'"):
        call_of(name, **options)


DRAWN = {
    "responses": {"temperature": 0.5, "top_p": 0.25},
    "anthropic": {"temperature": 0.5, "top_p": 0.25, "top_k": 4, "stop_sequences": ["x"]},
    "gemini": {
        "generationConfig": {"temperature": 0.5, "topP": 0.25, "topK": 4.0, "stopSequences": ["x"], "candidateCount": 2}
        | {"seed": 3, "presencePenalty": 1, "frequencyPenalty": -1, "maxOutputTokens": 7}
    },
}


def test_how_tokens_are_drawn_is_what_the_client_says() -> None:
    drawing = {"temperature": 0.5, "top_p": 0.25}
    assert call_of("responses", **DRAWN["responses"]).drawing == drawing
    call = call_of("anthropic", **DRAWN["anthropic"])
    assert (call.drawing, call.stop, call.max_new_tokens) == (drawing | {"top_k": 4}, ["x"], 100)
    call = call_of("gemini", **DRAWN["gemini"])
    assert call.drawing == drawing | {"top_k": 4, "presence_penalty": 1, "frequency_penalty": -1}
    assert (call.choices, call.seed, call.max_new_tokens, call.stop) == (2, 3, 7, ["x"])


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("name", "change", "place"),
    [
        ("responses", {"background": True}, "background"),
        ("responses", {"truncation": "auto"}, "truncation"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ("responses", {"input": [5]}, "input"),
        ("responses", {"text": {"verbosity": "low"}}, "text"),
        ("responses", {"top_logprobs": 3}, "top_logprobs"),
        ("anthropic", {"mcp_servers": []}, "mcp_servers"),
        ("anthropic", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ("anthropic", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ("anthropic", {"max_tokens": 0}, "max_tokens"),
        ("gemini", {"cachedContent": "x"}, "cachedContent"),
        ("gemini", {"tools": [{"googleSearch": {}}]}, "tools"),
        ("gemini", {"generationConfig": {"responseLogprobs": True}}, "generationConfig"),
        ("gemini", {"generationConfig": {"topK": 1.5}}, "generationConfig"),
        ("gemini", {"contents": [{"parts": [{"inlineData": {}}]}]}, "contents"),
        ("gemini", {"contents": [{"parts": [{"text": "a", "functionCall": {"name": "b"}}]}]}, "contents"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(name: str, change: dict, place: str) -> None:
    dialect = DIALECTS[name]
    body = {**dialect.body(dialect.entries([Message("user", "hi")])), **change}
    with pytest.raises(ValidationError) as refused:
        dialect.call(body)
    assert {error["loc"][0] for error in refused.value.errors()} == {place}


CACHED = {"cache_control": {"type": "ephemeral"}}
HINTS = {
    "responses": {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}}
    | {"service_tier": "auto", "prompt_cache_key": "k", "truncation": "disabled", "max_tool_calls": 3},
    "anthropic": {"metadata": {"user_id": "u"}, "service_tier": "auto", "output_config": {"effort": "low"}, **CACHED}
    | {"system": [{"type": "text", "text": "be brief", **CACHED}], "thinking": {"type": "adaptive"}},
    "gemini": {"safetySettings": [{}], "generationConfig": {"responseModalities": ["TEXT"]}},
}


@pytest.mark.parametrize("name", HINTS)
def test_hints_are_taken_and_change_nothing(name: str) -> None:
    call = call_of(name, **HINTS[name])
    assert (call.prompts[0].messages[-1], call.answer, call.drawing) == (Message("user", "hi"), None, {})


# What is a dialect's own.


def test_googles_schemas_are_json_schemas() -> None:
    word = {"type": "STRING", "nullable": True, "format": "enum", "enum": ["a"]}
    fields = {"type": word, "many": {"type": "ARRAY", "items": {"anyOf": [{"type": "INTEGER"}]}}}
    declared = {"name": "f", "parameters": {"type": "OBJECT", "properties": fields, "propertyOrdering": ["type"]}}
    body = {"contents": [{"parts": [{"text": "hi"}]}], "tools": [{"function_declarations": [declared]}]}
    (tool,) = chat_of(Gemini(), body).tools
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "type": {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]},
            "many": {"type": "array", "items": {"anyOf": [{"type": "integer"}]}},
        },
    }


def test_functions_that_answer_out_of_order_are_known_by_name_or_id() -> None:
    calls = [{"functionCall": {"id": each, "name": each[0]}} for each in ("a1", "b1", "a2")]
    answers = [{"name": "b"}, {"name": "a", "id": "a2"}, {"name": "a"}, {"name": "c", "id": "x"}]
    told = [{"functionResponse": {**each, "response": {"n": 1}}} for each in answers]
    contents = [{"role": "model", "parts": calls}, {"role": "user", "parts": [*told[:1]]}, {"parts": told[1:]}]
    read = chat_of(Gemini(), {"contents": contents}).messages
    assert [each.tool_call_id for each in read[1:]] == ["b1", "a2", "a1", "x"]
    assert read[1] == Message("tool", '{"n": 1}', tool_call_id="b1")


def test_turns_of_responses_are_told_apart_by_their_order() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": ""}
    items = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, call]
    items += [{"role": "assistant", "content": "!"}]
    items += [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}]
    items += [{"role": "assistant", "content": "c"}]
    read = chat_of(Responses(), Responses().body(items)).messages
    assert [(each.content, len(each.tool_calls)) for each in read] == [("a", 0), ("b!", 1), ("c", 0)]
