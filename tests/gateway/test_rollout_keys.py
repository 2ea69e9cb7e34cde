"""The app with a key per rollout, over a fleet that says what the test wants (2 s)."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from support.gateway import ADD, MODEL, ScriptedFleet, app_over, http_client, policy_of, session_request
from support.sessions import rendered_anew

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.errors import GeneratorFailed, RequestError, RequestLost, RolloutOver
from titan_rl.gateway.callers import RolloutKeys
from titan_rl.gateway.calls import ApiError
from titan_rl.gateway.choices import StreamedText
from titan_rl.types import Endpoint, FinishReason, Message

URL = "http://gateway/v1"
LENGTH = 256


class Gateway:
    """Must be made within a loop."""

    def __init__(self, renderer: SymbolRenderer, *texts: str | Exception | None) -> None:
        self.fleet = ScriptedFleet(renderer, *texts)
        policy = policy_of(renderer, LENGTH)
        self.keys = RolloutKeys(policy, base_url=URL, run_seed=1)
        self.app = app_over(self.fleet, policy, self.keys)

    async def open(self, session_id: str = "s", **options) -> openai.AsyncOpenAI:
        return self.client((await self.keys.open(session_request(session_id, **options))).api_key)

    def client(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=URL, api_key=key, http_client=http_client(self.app))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def ask(client: openai.AsyncOpenAI, *messages, **options):
    return await client.chat.completions.create(model=MODEL, messages=list(messages), **options)


# Keys.


async def test_an_endpoint_is_what_openais_clients_read(renderer):
    gateway = Gateway(renderer)
    endpoint = await gateway.keys.open(session_request("s"))
    assert endpoint == Endpoint(base_url=URL, api_key=endpoint.api_key, model=MODEL)
    told = endpoint.environ()
    assert told["OPENAI_BASE_URL"] == f"{told['ANTHROPIC_BASE_URL']}/v1" == endpoint.base_url
    assert {told[f"{vendor}_API_KEY"] for vendor in ("OPENAI", "ANTHROPIC")} == {endpoint.api_key}


@pytest.mark.parametrize("header", ["Bearer ", "Bearer sk-guess", "Bearer s", "Bearer \udcff", "KEY", "Basic KEY"])
async def test_no_other_key_is_good_and_no_other_scheme(renderer, header):
    gateway = Gateway(renderer, "1$")
    header = header.replace("KEY", (await gateway.open()).api_key).encode(errors="surrogateescape")
    async with http_client(gateway.app) as http:
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/metrics")):
            answer = await http.request(method, path, headers={b"authorization": header})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert gateway.fleet.asked == []


async def test_a_key_is_good_until_its_session_is_closed(renderer):
    gateway = Gateway(renderer, "2$", "3$")
    client = await gateway.open()
    await ask(client, user("1"))
    await gateway.keys.close("s")
    with pytest.raises(openai.AuthenticationError):
        await ask(client, user("1"))
    assert len(gateway.fleet.asked) == 1


async def test_a_session_is_opened_once_and_closed_once(renderer):
    gateway = Gateway(renderer)
    await gateway.open()
    with pytest.raises(RequestError, match="open already"):
        await gateway.open()
    await gateway.keys.close("s")
    for refused in (gateway.keys.close("s"), gateway.keys.idle("s", 0)):
        with pytest.raises(RolloutOver, match="no open rollout s"):
            await refused
    await gateway.open()


# What is recorded.


async def test_a_conversation_with_a_tool_goes_on_in_the_sampled_tokens(renderer):
    gateway = Gateway(renderer, "4<tool>1+2</tool>", "3$")
    client = await gateway.open()
    answer = (await ask(client, user("1+2="), tools=[ADD])).choices[0].message
    (call,) = answer.tool_calls
    assert (answer.content, call.function.name, json.loads(call.function.arguments)) == ("4", "add", {"terms": "1+2"})
    back = {"role": "assistant", "content": answer.content, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    assert (await ask(client, user("1+2="), back, result, tools=[ADD])).choices[0].message.content == "3"

    record = await gateway.keys.close("s")
    first, second = record.turns
    assert second.prompt_token_ids.tolist() == renderer.encode("1+2=4<tool>1+2</tool><result>3</result>")
    assert renderer.decode(second.completion.token_ids.tolist()) == "3<eos>"
    assert first.completion.logprobs.tolist() == [-1, -2, -3, -4, -5, -6]
    assert first.completion.versions.tolist() == [3] * 6
    assert [message.role for message in record.messages] == ["user", "assistant", "tool", "assistant"]
    assert record.messages[-1] == Message("assistant", "3")
    assert [turn.finish_reason for turn in record.turns] == [FinishReason.STOP] * 2
    assert (rendered_anew(record), record.failure) == (0, "")


async def test_a_turn_belongs_to_the_role_that_its_call_names_as_the_user(renderer):
    gateway = Gateway(renderer, "1$", "2$", "3$")
    client = await gateway.open()
    await ask(client, user("1"), user="first")
    await ask(client, user("22"), user="second")
    await ask(client, user("333"))
    assert [turn.role for turn in (await gateway.keys.close("s")).turns] == ["first", "second", ""]


@pytest.mark.parametrize("sent_back", [lambda answer: answer, lambda answer: answer.model_dump()], ids=["it", "dump"])
async def test_what_openais_client_gives_may_be_sent_back_as_it_came(renderer, sent_back):
    gateway = Gateway(renderer, "<tool>1</tool>", "2$", "3$")
    client = await gateway.open()
    messages = [user("1=")]
    for _ in range(2):
        answer = (await ask(client, *messages, tools=[ADD])).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in answer.tool_calls or ()]
        messages += [sent_back(answer), *(results or [user("=")])]
    await ask(client, *messages, tools=[ADD])
    record = await gateway.keys.close("s")
    assert renderer.decode(record.turns[-1].prompt_token_ids.tolist()) == "1=<tool>1</tool><result>1</result>2<eos>="
    assert rendered_anew(record) == 0


async def test_a_malformed_call_is_the_text_that_it_was(renderer):
    gateway = Gateway(renderer, "12</tool>", "3$")
    client = await gateway.open()
    answer = (await ask(client, user("="), tools=[ADD])).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("12</tool>", None, "stop")
    await ask(client, user("="), {"role": "assistant", "content": "12</tool>"}, user("+"), tools=[ADD])
    record = await gateway.keys.close("s")
    assert renderer.decode(record.turns[-1].prompt_token_ids.tolist()) == "=12</tool>+"
    assert rendered_anew(record) == 0


async def test_a_stop_text_cuts_what_is_recorded_behind_it(renderer):
    gateway = Gateway(renderer, "12+=34$", "5$")
    client = await gateway.open()
    choice = (await ask(client, user("1"), stop=["+="], temperature=0.3)).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("12", "stop")
    await ask(client, user("1"), {"role": "assistant", "content": "12"}, user("9"))
    record = await gateway.keys.close("s")
    completion = record.turns[0].completion
    assert renderer.decode(completion.token_ids.tolist()) == "12+="
    assert completion.logprobs.tolist() == [-1, -2, -3, -4]
    assert len(completion.versions) == 4
    assert completion.finish_reason is FinishReason.LENGTH  # no stop token is its last
    assert [turn.finish_reason for turn in record.turns] == [FinishReason.STOP] * 2
    assert renderer.decode(record.turns[1].prompt_token_ids.tolist()) == "112+=9"


async def test_streams_are_recorded_like_whole_answers(renderer):
    gateway = Gateway(renderer, "2$", "3$")
    client = await gateway.open()
    stream = await ask(client, user("1"), stream=True, n=2)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    record = await gateway.keys.close("s")
    assert {renderer.decode(call.completion.token_ids.tolist()) for call in record.turns} == {"2<eos>", "3<eos>"}
    assert texts == {0: "2", 1: "3"}
    assert record.messages == [Message("user", "1"), Message("assistant", "2")]


async def test_text_completions_take_token_ids_as_they_are(renderer):
    gateway = Gateway(renderer, "2$", "3$")
    client = await gateway.open()
    ids = renderer.encode("<tool>1")
    await client.completions.create(model=MODEL, prompt=ids, max_tokens=7)
    await client.completions.create(model=MODEL, prompt="1=")
    record = await gateway.keys.close("s")
    assert sorted(call.prompt_token_ids.tolist() for call in record.turns) == sorted([ids, renderer.encode("1=")])
    assert [each.sampling.max_new_tokens for each in gateway.fleet.asked] == [7, 16]
    assert record.messages == [Message("user", "1="), Message("assistant", "3")]


async def test_two_sessions_do_not_know_each_others_conversations(renderer):
    gateway = Gateway(renderer, "2", "3$", "4$")  # the first is cut off
    one, other = await gateway.open("one"), await gateway.open("other")
    await ask(one, user("1"))
    await ask(other, user("1"), {"role": "assistant", "content": "2"}, user("="))
    await ask(one, user("1"), {"role": "assistant", "content": "2"}, user("="))
    records = [await gateway.keys.close(name) for name in ("one", "other")]
    prompts = [[renderer.decode(call.prompt_token_ids.tolist()) for call in record.turns] for record in records]
    assert prompts == [["1", "12="], ["12<eos>="]]  # not the other's turn, which has no end
    assert [each.session_id for each in gateway.fleet.asked] == ["one", "other", "one"]


# What is refused, fails or is abandoned.


async def test_a_program_is_not_refused_for_its_habits_and_the_run_samples_as_it_does(renderer):
    gateway = Gateway(renderer, "2$")
    client = await gateway.open()
    habits = {"temperature": 0, "top_p": 0.5, "seed": 4, "presence_penalty": 1, "frequency_penalty": 1}
    more = {"top_k": 4, "min_tokens": 2, "repetition_penalty": 1.5}
    await ask(client, user("1"), **habits, extra_body=more)
    sampling = gateway.fleet.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.depends_on_output) == (1.0, 1.0, -1, False)
    async with http_client(gateway.app) as http:
        metrics = (await http.get("/metrics", headers={"authorization": f"Bearer {client.api_key}"})).text
    for option in habits.keys() | {"top_k", "min_new_tokens", "repetition_penalty"}:
        assert f'ignored_options_total{{option="{option}"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("options", "budget", "told"),
    [
        ({}, {"max_turns": 1}, "1 turns"),
        ({"n": 2}, {"max_turns": 2}, "2 turns"),
        ({}, {"max_sampled_tokens": 2}, "2 tokens"),
    ],
)
async def test_past_its_budget_a_program_is_refused_and_not_told_to_try_again(renderer, options, budget, told):
    gateway = Gateway(renderer, "2$", "3$")
    client = await gateway.open(**budget)
    await ask(client, user("1"))
    with pytest.raises(openai.PermissionDeniedError, match=told) as refused:
        await ask(client, user("1"), **options)
    assert refused.value.code == "rollout_over"
    assert refused.value.response.headers["x-should-retry"] == "false"
    record = await gateway.keys.close("s")
    assert (len(record.turns), record.failure) == (1, "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (GeneratorFailed("generator0 died"), "GeneratorFailed: generator0 died"),
        (ValueError("oops"), "ValueError: oops"),
        (RequestError("too much"), ""),
    ],
    ids=["an engine's", "ours", "the program's"],
)
async def test_a_failure_is_recorded_unless_it_is_the_programs_fault(renderer, error, failure, stream):
    gateway = Gateway(renderer, "2$", error)
    client = (await gateway.open()).with_options(max_retries=0)
    await ask(client, user("1"))
    with pytest.raises(openai.APIStatusError, match=str(error)) as shown:
        await ask(client, user("1"), stream=stream)
    assert (shown.value.status_code == 400) == (not failure)
    record = await gateway.keys.close("s")
    assert (len(record.turns), record.failure) == (1, failure)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_rollout_under_which_generators_died_is_lost_though_its_program_went_on(renderer, stream):
    gateway = Gateway(renderer, RequestLost("2 generators died under it"), "2$")
    client = (await gateway.open()).with_options(max_retries=0)
    with pytest.raises(openai.InternalServerError, match="2 generators died"):
        await ask(client, user("1"), stream=stream)
    await ask(client, user("1"))
    with pytest.raises(RequestLost):
        await gateway.keys.close("s")
    with pytest.raises(RolloutOver):
        await gateway.keys.close("s")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_read_is_not_the_programs_fault(renderer, monkeypatch, stream):
    def rest(text, content):
        raise ApiError(500, "the complete turn reads otherwise than what was streamed of it")

    monkeypatch.setattr(StreamedText, "rest", rest)
    gateway = Gateway(renderer, "2$")
    client = (await gateway.open()).with_options(max_retries=0)
    with pytest.raises(openai.InternalServerError, match="reads otherwise than what was streamed"):
        await ask(client, user("1"), stream=stream)
    record = await gateway.keys.close("s")
    assert (record.turns, record.failure) == ([], "") and "reads otherwise" in record.misread


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_a_session_aborts_its_open_calls_and_records_nothing_of_them(renderer, stream):
    gateway = Gateway(renderer, None, None)
    client = await gateway.open()
    calls = [asyncio.ensure_future(ask(client, user("1"), stream=stream)) for _ in range(2)]
    await gateway.fleet.until(2)
    record = await gateway.keys.close("s")
    for call in calls:
        with pytest.raises(openai.PermissionDeniedError) as ended:
            await call
        assert ended.value.code == "rollout_over"
    await gateway.fleet.until(0)
    assert (record.turns, record.messages, record.failure) == ([], [], "")


async def test_a_session_is_idle_while_it_has_no_open_call(renderer):
    gateway = Gateway(renderer, None)
    client = await gateway.open()
    await gateway.keys.idle("s", 0)
    call = asyncio.ensure_future(ask(client, user("1")))
    await gateway.fleet.until(1)
    idle = asyncio.ensure_future(gateway.keys.idle("s", 0))
    later = asyncio.ensure_future(gateway.keys.idle("s", 1e6))
    await asyncio.wait([idle, later], timeout=0)
    assert not idle.done()
    call.cancel()
    await idle
    assert not later.done()
    await gateway.keys.close("s")
    await later
