"""Each dialect's own client, against the app over a policy that says what the test wants. About 10 s.

Gemini's is played with HTTP: its package is not among those that are locked.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from support.dialects import DIALECTS, Clients, Dialect
from support.gateway import MODEL, ScriptedFleet, app_over, http_client, policy_of, session_request
from support.sessions import rendered_anew

from titan_rl.chat import make_renderer
from titan_rl.chat.renderer import Renderer
from titan_rl.errors import GeneratorFailed
from titan_rl.gateway import responses
from titan_rl.gateway.callers import ApiKeys, RolloutKeys
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import Message, ToolCall, ToolSpec

ADD = ToolSpec("add", "adds", {"type": "object", "properties": {"terms": {"type": "string"}}})
LENGTH = 2048
END = "<|im_end|>"


def written(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = f"<think>\nI add.\n</think>\n\nLet me see.\n{written('add', terms='1+2')}\n{written('add', terms='3+4')}{END}"
SAYS = f"<think>\nEasy.\n</think>\n\nIt is 3 and 7.{END}"
ONLY_CALLS = f"{written('add', terms='5')}{END}"
BEHIND = f"Look: {written('add', terms='5')}\n<tool_call>\nadd 5\n</tool_call>{END}"
"""What is no call is text."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Qwen3's format over bytes."""
    return make_renderer("auto", make_tiny_policy(TinyPolicyConfig(tokenizer="chat"), tmp_path_factory.mktemp("chat")))


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    if request.param == "anthropic":
        pytest.importorskip("anthropic")
    return DIALECTS[request.param]


class Gateway:
    """Must be made within a loop."""

    def __init__(self, renderer: Renderer, *texts: str | Exception | None) -> None:
        self.fleet = ScriptedFleet(renderer, *texts)
        policy = policy_of(renderer, LENGTH)
        self.keys = RolloutKeys(policy, base_url="http://gateway/v1", run_seed=1)
        self.app = app_over(self.fleet, policy, self.keys)

    async def open(self, session_id: str = "s", **options: Any) -> Clients:
        return Clients(self.app, (await self.keys.open(session_request(session_id, tokens=900, **options))).api_key)


def user(dialect: Dialect, text: str) -> list[dict]:
    return dialect.entries([Message("user", text)])


def results(dialect: Dialect, answer: Any, *texts: str) -> list[dict]:
    """What the tools gave that an answer calls."""
    calls = [ToolCall(name, arguments, id=call_id) for call_id, name, arguments in answer.calls]
    told = [Message("tool", text, tool_call_id=call.id) for text, call in zip(texts, calls, strict=True)]
    before = len(dialect.entries([Message("assistant", "", tuple(calls))]))
    return dialect.entries([Message("assistant", "", tuple(calls)), *told])[before:]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_goes_on_in_the_sampled_tokens(
    chat: Renderer, dialect: Dialect, stream: bool
) -> None:
    gateway = Gateway(chat, CALLS, SAYS, ONLY_CALLS, f"7{END}")
    clients = await gateway.open()
    said = user(dialect, "1+2? 3+4?")
    texts = []
    for tools_said in (["3", "7"], None, ["5"], None):
        answer = await dialect.ask(clients, dialect.body(said, "Be brief.", [ADD]), stream=stream)
        texts.append((answer.text, answer.reasoning, [arguments for _, _, arguments in answer.calls]))
        said += [*answer.said, *(results(dialect, answer, *tools_said) if tools_said else user(dialect, "And 5?"))]
    assert texts == [
        ("Let me see.", "I add.", [{"terms": "1+2"}, {"terms": "3+4"}]),
        ("It is 3 and 7.", "Easy.", []),
        ("", "", [{"terms": "5"}]),
        ("7", "", []),
    ]
    record = await gateway.keys.close("s")
    assert (rendered_anew(record), record.failure, record.misread) == (0, "", "")
    prompts = [turn.prompt_token_ids.tolist() for turn in record.turns]
    assert prompts[0] == chat.render([Message("system", "Be brief."), Message("user", "1+2? 3+4?")], [ADD])
    for turn, longer in zip(record.turns, prompts[1:], strict=False):
        before = [*turn.prompt_token_ids.tolist(), *turn.completion.token_ids.tolist()]
        assert longer[: len(before)] == before, "what was sampled is there once, as it was sampled"
    roles = ["system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant", "tool", "assistant"]
    assert [message.role for message in record.messages] == roles
    assert [message.content for message in record.messages if message.role == "tool"] == ["3", "7", "5"]


@pytest.mark.parametrize(("text", "thought"), [(CALLS, "I add."), (SAYS, "Easy.")])
async def test_of_equal_answers_the_one_that_came_back_goes_on(
    chat: Renderer, dialect: Dialect, text: str, thought: str
) -> None:
    """It is known by the ids of its calls, and without calls by its thinking."""
    gateway = Gateway(chat, text, text.replace(thought, "Hm."), SAYS)
    clients, said = await gateway.open(), user(dialect, "1+2? 3+4?")
    answer, _ = [await dialect.ask(clients, dialect.body(said, tools=[ADD]), stream=False) for _ in range(2)]
    calls = tuple(ToolCall(name, arguments, id=call_id) for call_id, name, arguments in answer.calls)
    told = Message("assistant", answer.text, calls, reasoning="" if calls else answer.reasoning)
    told_by_tools = [Message("tool", "3", tool_call_id=call.id) for call in calls]
    said += dialect.entries([told, *told_by_tools, *([] if calls else [Message("user", "And 5?")])])
    await dialect.ask(clients, dialect.body(said, tools=[ADD]), stream=False)
    record = await gateway.keys.close("s")
    (first,) = (turn for turn in record.turns[:2] if turn.message.reasoning == thought)
    before = [*first.prompt_token_ids.tolist(), *first.completion.token_ids.tolist()]
    assert record.turns[2].prompt_token_ids.tolist()[: len(before)] == before


@pytest.mark.parametrize("text", [CALLS, SAYS, ONLY_CALLS, BEHIND, END, "It goes", "<think>\nIt goes"])
async def test_the_events_of_a_stream_are_the_whole_answer(chat: Renderer, dialect: Dialect, text: str) -> None:
    gateway = Gateway(chat, text, text)
    clients = await gateway.open()
    body = dialect.body(user(dialect, "hi"), tools=[ADD])
    whole, streamed = [await dialect.ask(clients, body, stream=stream) for stream in (False, True)]
    assert streamed.content == whole.content
    usage = [json.loads(each.whole.model_dump_json()) for each in (whole, streamed) if hasattr(each.whole, "usage")]
    assert all(each["usage"] == usage[0]["usage"] for each in usage)


@pytest.mark.parametrize("stream", [False, True])
async def test_text_behind_a_call_belongs_to_its_turn(chat: Renderer, dialect: Dialect, stream: bool) -> None:
    gateway = Gateway(chat, BEHIND, SAYS)
    clients, said = await gateway.open(), user(dialect, "5?")
    answer = await dialect.ask(clients, dialect.body(said, tools=[ADD]), stream=stream)
    assert "Look:" in answer.text and "add 5" in answer.text and len(answer.calls) == 1
    said += [*answer.said, *results(dialect, answer, "5")]
    await dialect.ask(clients, dialect.body(said, tools=[ADD]), stream=stream)
    assert rendered_anew(await gateway.keys.close("s")) == 0


async def test_calls_that_the_policy_did_not_name_have_ids_of_their_own(chat: Renderer, dialect: Dialect) -> None:
    clients = await Gateway(chat, CALLS, CALLS).open()
    body = dialect.body(user(dialect, "hi"), tools=[ADD])
    answers = [await dialect.ask(clients, body, stream=stream) for stream in (False, True)]
    ids = {call_id for answer in answers for call_id, _, _ in answer.calls}
    assert len(ids) == 4 and all(ids)


REASONS = {
    "chat": ("tool_calls", "stop", "length"),
    "responses": ("completed", "completed", "incomplete"),
    "anthropic": ("tool_use", "end_turn", "max_tokens"),
    "gemini": ("STOP", "STOP", "MAX_TOKENS"),
}


async def test_why_an_answer_ended_is_said_as_its_dialect_says_it(chat: Renderer, dialect: Dialect) -> None:
    clients = await Gateway(chat, ONLY_CALLS, SAYS, "It goes").open()
    body = dialect.body(user(dialect, "hi"), tools=[ADD])
    reasons = tuple([(await dialect.ask(clients, body, stream=False)).reason for _ in range(3)])
    assert reasons == next(REASONS[name] for name, each in DIALECTS.items() if each is dialect)


async def events_of(chat: Renderer, path: str, body: dict, *texts: str | Exception) -> list[dict]:
    app = app_over(ScriptedFleet(chat, *texts), policy_of(chat, LENGTH))
    async with http_client(app) as http:
        lines = (await http.post(path, json=body)).text.split("\n\n")
    told = [each.split("\n") for each in lines if each]
    events = [json.loads(data.removeprefix("data: ")) for _, data in told]
    assert [name for name, _ in told] == [f"event: {event['type']}" for event in events]
    return events


async def test_the_events_of_responses_come_in_openais_order(chat: Renderer) -> None:
    responses_ = DIALECTS["responses"]
    body = responses_.body(user(responses_, "hi"), tools=[ADD], stream=True)
    events = await events_of(chat, "/v1/responses", body, CALLS)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    names = [event["type"].removeprefix("response.") for event in events]
    several = [name for number, name in enumerate(names) if number == 0 or name != names[number - 1]]
    calls = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert several == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(*calls, *calls, "completed"),
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done


async def test_the_events_of_anthropic_come_in_its_order(chat: Renderer) -> None:
    messages = DIALECTS["anthropic"]
    body = messages.body(user(messages, "hi"), tools=[ADD], stream=True)
    events = await events_of(chat, "/v1/messages", body, CALLS)
    told = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events]
    several = [each for number, each in enumerate(told) if number == 0 or each != told[number - 1]]
    begin, grow, end = (f"content_block_{name}" for name in ("start", "delta", "stop"))
    blocks = [("thinking_delta", "signature_delta"), ("text_delta",), *[("input_json_delta",)] * 2]
    between = [
        step
        for number, kinds in enumerate(blocks)
        for step in ((begin, number, None), *((grow, number, kind) for kind in kinds), (end, number, None))
    ]
    ends = [("message_delta", None, None), ("message_stop", None, None)]
    assert several == [("message_start", None, None), *between, *ends]


async def test_a_stream_that_fails_ends_with_its_error(chat: Renderer, dialect: Dialect) -> None:
    class Half(ScriptedFleet):
        async def stream(self, request, on_piece):
            await super().stream(request, lambda piece: piece.offset < 10 and on_piece(piece))
            raise GeneratorFailed("generator0 died")

    app = app_over(Half(chat, SAYS), policy_of(chat, LENGTH))
    with pytest.raises(Exception, match="generator0 died"):
        await dialect.ask(Clients(app), dialect.body(user(dialect, "hi")), stream=True)


# Thinking that nobody asked for.


async def test_thinking_is_shown_to_those_who_ask(chat: Renderer) -> None:
    asked = {"anthropic": {"thinking": {"type": "disabled"}}, "gemini": {"generationConfig": {"thinkingConfig": {}}}}
    for name, options in asked.items():
        dialect = DIALECTS[name]
        async with http_client(app_over(ScriptedFleet(chat, SAYS), policy_of(chat, LENGTH))) as http:
            body = dialect.body(user(dialect, "hi"), **options)
            answer = dialect.answer((await http.post(dialect.path, json=body)).json())
        assert (answer.text, answer.reasoning) == ("It is 3 and 7.", "")


# Responses that are stored.


async def test_a_stored_response_is_gone_on_from_and_read_again(chat: Renderer) -> None:
    gateway = Gateway(chat, CALLS, SAYS)
    client = (await gateway.open()).openai()
    tools: list[Any] = [{"type": "function", **ADD._asdict(), "strict": False}]
    first = await client.responses.create(model=MODEL, input="1+2? 3+4?", tools=tools, instructions="Be brief.")
    calls = [item for item in first.output if item.type == "function_call"]
    given = [
        {"type": "function_call_output", "call_id": call.call_id, "output": text}
        for call, text in zip(calls, "37", strict=True)
    ]
    again: dict[str, Any] = {"model": MODEL, "tools": tools, "instructions": "Be brief."}
    second = await client.responses.create(input=given, previous_response_id=first.id, **again)
    assert second.output_text == "It is 3 and 7." and second.previous_response_id == first.id
    assert (await client.responses.retrieve(second.id)).model_dump() == second.model_dump()
    record = await gateway.keys.close("s")
    assert rendered_anew(record) == 0
    assert [turn.message.reasoning for turn in record.turns] == ["I add.", "Easy."]


async def test_only_its_own_key_may_go_on_from_a_response(chat: Renderer) -> None:
    gateway = Gateway(chat, SAYS, SAYS)
    mine, other = (await gateway.open("mine")).openai(), (await gateway.open("other")).openai()
    kept = await mine.responses.create(model=MODEL, input="hi")
    dropped = await mine.responses.create(model=MODEL, input="hi", store=False)
    for client, wrong in ((other, kept.id), (mine, dropped.id), (mine, "resp_guess")):
        with pytest.raises(openai.BadRequestError, match=f"no stored response '{wrong}'") as refused:
            await client.responses.create(model=MODEL, input="hi", previous_response_id=wrong)
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError, match=wrong):
            await client.responses.retrieve(wrong)
    assert len(gateway.fleet.asked) == 2


async def test_the_oldest_responses_make_room(chat: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "STORED_BYTES", 5000)
    client = Clients(app_over(ScriptedFleet(chat, *[SAYS] * 20), policy_of(chat, LENGTH))).openai()
    ids = [(await client.responses.create(model=MODEL, input="hi")).id for _ in range(20)]
    assert (await client.responses.retrieve(ids[-1])).output_text
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(ids[0])


# What is counted, stopped and refused.


async def test_tokens_are_counted_as_they_will_be_read(chat: Renderer) -> None:
    app = app_over(ScriptedFleet(chat, SAYS, SAYS), policy_of(chat, LENGTH))
    for name, path, found in (
        ("anthropic", "/v1/messages/count_tokens", "input_tokens"),
        ("gemini", f"/v1beta/models/{MODEL}:countTokens", "totalTokens"),
        ("gemini", f"/v1/models/{MODEL}:countTokens", "totalTokens"),
    ):
        body = DIALECTS[name].body(user(DIALECTS[name], "hi"))
        counted = {key: value for key, value in body.items() if key not in ("max_tokens", "generationConfig")}
        async with http_client(app) as http:
            assert (await http.post(path, json=counted)).json()[found] == len(chat.render([Message("user", "hi")]))


@pytest.mark.parametrize("stop", ["is 3", "!"])  # several tokens, and one
async def test_the_stop_text_that_ended_an_answer_is_named(chat: Renderer, stop: str) -> None:
    messages = DIALECTS["anthropic"]
    body = messages.body(user(messages, "hi"), stop_sequences=["nothing", stop])
    said = "It is 3 and 7." if stop == "is 3" else "It !"
    async with http_client(app_over(ScriptedFleet(chat, said), policy_of(chat, LENGTH))) as http:
        answer = (await http.post("/v1/messages", json=body)).json()
    assert (answer["content"][-1]["text"].strip(), answer["stop_reason"], answer["stop_sequence"]) == (
        "It",
        "stop_sequence",
        stop,
    )


ERRORS = {
    "anthropic": {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    | {403: "permission_error", 503: "overloaded_error"},
    "gemini": {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND"}
    | {403: "PERMISSION_DENIED", 503: "UNAVAILABLE"},
}


@pytest.mark.parametrize(("name", "version"), [("anthropic", "v1"), ("gemini", "v1"), ("gemini", "v1beta")])
async def test_errors_have_the_form_of_their_dialect(chat: Renderer, name: str, version: str) -> None:
    dialect, gateway = DIALECTS[name], Gateway(chat, GeneratorFailed("generator0 died"), SAYS)
    key = (await gateway.open(max_turns=2)).key
    right, right_path = dialect.body(user(dialect, "hi")), dialect.path.replace("v1beta", version)
    wrong_model = {"path": right_path.replace(MODEL, "gpt"), "body": {**right, "model": "gpt"}}
    asked: list[tuple[int, dict]] = [(503, {}), (200, {}), (403, {}), (401, {"key": "no"}), (404, wrong_model)]
    async with http_client(gateway.app) as http:
        for status, change in [*asked, (400, {"body": {**right, "bogus": 1}})]:
            headers = {"x-api-key" if name == "anthropic" else "x-goog-api-key": change.get("key", key)}
            path, body = change.get("path", right_path), change.get("body", right)
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 200:
                continue
            told = answer.json()
            assert (told["error"]["type"] if name == "anthropic" else told["error"]["status"]) == ERRORS[name][status]
            assert told.get("type") == ("error" if name == "anthropic" else None)
            assert told["error"]["message"] and answer.headers["x-should-retry"] == "false"


LIMITS: dict[str, tuple[dict, str]] = {
    "responses": ({"max_output_tokens": LENGTH}, "max_output_tokens"),
    "anthropic": ({"max_tokens": LENGTH}, "max_tokens"),
    "gemini": ({"generationConfig": {"max_output_tokens": LENGTH}}, "generationConfig.maxOutputTokens"),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_what_does_not_fit_has_its_name_in_the_dialect(chat: Renderer, name: str) -> None:
    dialect, (change, field) = DIALECTS[name], LIMITS[name]
    async with http_client(app_over(ScriptedFleet(chat), policy_of(chat, LENGTH))) as http:
        body = {**dialect.body(user(dialect, "hi")), **change}
        error = (await http.post(dialect.path, json=body)).json()["error"]
        assert f"{LENGTH} of {field} do not fit" in error["message"] and error.get("param", field) == field
        body = dialect.body(user(dialect, "x" * 99 * LENGTH))
        assert (await http.post(dialect.path, json=body)).json()["error"].get("param", "input") == "input"


@pytest.mark.parametrize("where", ["authorization", "x-api-key", "x-goog-api-key", "key"])
async def test_the_key_may_stand_where_each_dialect_has_it(chat: Renderer, where: str) -> None:
    policy = policy_of(chat, LENGTH)
    app = app_over(ScriptedFleet(chat), policy, ApiKeys(policy, "secret"))
    async with http_client(app) as http:
        for key, status in (("secret", 200), ("wrong", 401), *([("€", 401)] if where == "key" else [])):
            value = f"Bearer {key}" if where == "authorization" else key
            given: dict[str, Any] = {"params": {where: value}} if where == "key" else {"headers": {where: value}}
            assert (await http.get("/v1beta/models", **given)).status_code == status


async def test_gemini_lists_its_model_and_streams_only_as_events(chat: Renderer) -> None:
    gemini = DIALECTS["gemini"]
    async with http_client(app_over(ScriptedFleet(chat, SAYS, SAYS), policy_of(chat, LENGTH))) as http:
        (model,) = (await http.get("/v1beta/models")).json()["models"]
        assert (model["name"], model["inputTokenLimit"]) == (f"models/{MODEL}", LENGTH)
        body = gemini.body(user(gemini, "hi"), generationConfig={"candidateCount": 2})
        answer = (await http.post(gemini.path, json=body)).json()
        assert [each["index"] for each in answer["candidates"]] == [0, 1]
        path = gemini.path.replace(":generate", ":streamGenerate")
        refused = await http.post(path, json=body)
        metrics = (await http.get("/metrics")).text
    assert refused.status_code == 400 and "alt" in refused.json()["error"]["message"]
    assert f'calls_total{{path="{gemini.path}",status="200"}} 1.0' in metrics


async def test_a_text_may_be_echoed(renderer) -> None:
    app = app_over(ScriptedFleet(renderer, "4$", "5$", "6$"), policy_of(renderer, 64))
    async with http_client(app) as http:
        body = {"model": MODEL, "prompt": ["1+", "2+"], "echo": True}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["1+4", "2+5"]
        streamed = (await http.post("/v1/completions", json={**body, "prompt": "3+", "stream": True})).text
    chunks = [json.loads(line[6:]) for line in streamed.split("\n\n") if line and "DONE" not in line]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "3+6"
