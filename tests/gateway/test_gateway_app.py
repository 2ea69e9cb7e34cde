"""The app alone, over a fleet that the test plays (1 s)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from pydantic import ValidationError
from support.gateway import ADD, MODEL, ScriptedFleet, app_over, http_client, policy_of, say

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.errors import ActorFailed, GeneratorFailed, RequestLost
from titan_rl.gateway import app
from titan_rl.gateway.callers import ApiKeys
from titan_rl.gateway.config import GatewayConfig, listen
from titan_rl.gateway.openai_protocol import ChatCompletionRequest, CompletionRequest
from titan_rl.routing.health import Phase
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece


class PlayedFleet(ScriptedFleet):
    """Fails as often as it is told to, then answers with the prompt."""

    reason = FinishReason.LENGTH
    logprob = -np.inf

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        if self.errors:
            raise self.errors.pop()
        count = len(request.prompt_token_ids)
        return Completion(
            request_id=request.request_id,
            token_ids=request.prompt_token_ids,
            logprobs=np.full(count, self.logprob, np.float32),
            versions=np.zeros(count, np.int64),
            finish_reason=self.reason,
        )

    async def fleet_status(self) -> list[SimpleNamespace]:
        if self.errors:
            raise self.errors.pop()
        return []


def http(fleet: PlayedFleet, renderer: SymbolRenderer) -> httpx.AsyncClient:
    return http_client(app_over(fleet, policy_of(renderer, 32)))


async def complete(fleet: PlayedFleet, renderer: SymbolRenderer, **options) -> httpx.Response:
    async with http(fleet, renderer) as client:
        return await client.post("/v1/completions", json={"model": MODEL, "prompt": "01", **options})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GeneratorFailed("generator0 died"), 503),
        (ActorFailed("router: gone"), 503),
        (RequestLost("2 generators died under it"), 503),
    ],
    ids=str,
)
async def test_a_failure_of_the_fleet_is_a_5xx_with_its_cause(renderer, error, status, stream):
    answer = await complete(PlayedFleet(error), renderer, stream=stream)
    assert answer.status_code == status
    assert str(error) in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-should-retry"] == "false"


async def test_a_completion_that_somebody_else_aborted_is_a_503(renderer):
    fleet = PlayedFleet()
    fleet.reason = FinishReason.ABORT
    assert (await complete(fleet, renderer)).status_code == 503


async def test_a_failure_after_the_first_tokens_is_an_event_before_the_streams_end(renderer):
    class Half(PlayedFleet):
        async def stream(self, request: GenerationRequest, on_piece: Callable[[Piece], object]) -> Completion:
            await super().stream(request, lambda piece: piece.offset or on_piece(piece))
            await asyncio.sleep(0)  # the first tokens are on their way
            raise GeneratorFailed("generator0 died")

    answer = await complete(Half(), renderer, stream=True)
    assert answer.status_code == 200
    *told, end = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    first, last = map(json.loads, told)
    assert first["choices"][0]["text"] == "0"
    assert "generator0 died" in last["error"]["message"]
    assert end == "[DONE]"


async def test_tokens_that_come_while_a_request_is_given_up_are_not_part_of_its_answer(renderer):
    class Late(PlayedFleet):
        async def stream(self, request: GenerationRequest, on_piece: Callable[[Piece], object]) -> Completion:
            pieces: list[Piece] = []
            await super().stream(request, pieces.append)
            on_piece(pieces[0])
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                on_piece(pieces[1])

    answer = await complete(Late(), renderer, stream=True, stop="0")
    *told, end = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert end == "[DONE]"
    assert [json.loads(each)["choices"][0]["finish_reason"] for each in told][-1:] == ["stop"]
    assert sum(bool(json.loads(each)["choices"][0]["finish_reason"]) for each in told) == 1


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def post(renderer: SymbolRenderer, path: str, body: bytes, kind: str = "application/json") -> httpx.Response:
    async with http(PlayedFleet(), renderer) as client:
        return await client.post(path, content=body, headers={"content-type": kind})


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        (CHAT, {"bogus": 1}, "bogus: Extra inputs are not permitted"),
        (CHAT, {"messages": []}, "messages: List should have at least 1 item after validation, not 0"),
        (CHAT, {"messages": "hi"}, "messages: Input should be a valid list"),
        (CHAT, {"messages": [{"role": "robot", "content": "1"}]}, "messages.0: Input tag 'robot' found using 'role'"),
        (CHAT, {"messages": [{"content": "1"}]}, "messages.0: Unable to extract tag using discriminator 'role'"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content: Input should be a valid string; "),
        (TEXT, {"prompt": 5}, "prompt: Input should be a valid string; prompt: Input should be a valid list"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "1"}], "temperature": "0.5"},
            "temperature: Input should be a valid number",
        ),
        (CHAT, {"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        (CHAT, {"temperature": 0.001}, "temperature"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 10**30}, "max_tokens"),
        (CHAT, {"max_tokens": 2_000_000}, "max_model_len"),
        (CHAT, {"n": -1}, "n:"),
        (CHAT, {"n": 500}, "more than 128"),
        (CHAT, {"n": True}, "n:"),
        (CHAT, {"seed": 2**63}, "seed"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs: it needs logprobs"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [ADD, ADD]}, "one tool with one argument"),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}]}, "no symbol 'h'"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "no JSON"),
        (CHAT, {"model": "gpt"}, "no model 'gpt'"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ["1"] * 129}, "more than 128"),
        (TEXT, {"prompt": ""}, "empty"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [10**6]}, "outside of the vocabulary"),
        (TEXT, {"prompt": [[1, 2], []]}, "prompt"),
        (TEXT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"min_tokens": 20}, "min_tokens must be in [0, max_tokens"),
    ],
)
async def test_what_cannot_be_served_is_a_4xx_that_says_why(renderer, path, change, named):
    body = {CHAT: {"messages": say("1")}, TEXT: {"prompt": "1"}}[path]
    answer = await post(renderer, path, json.dumps({"model": MODEL, **body, **change}).encode())
    assert answer.status_code == (404 if "model" in change else 400), answer.text
    error = answer.json()["error"]
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"a":' * 5000, b'{"n": ' + b"9" * 5000 + b"}", b"NaN"]
)
async def test_what_is_no_json_object_is_a_400(renderer, body):
    answer = await post(renderer, TEXT, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"stop": 3}, "stop"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ],
)
async def test_a_wrong_field_is_named_as_the_body_has_it(renderer, change, place):
    body = {"model": MODEL, "messages": say("1"), **change}
    error = (await post(renderer, CHAT, json.dumps(body).encode())).json()["error"]
    assert f"{place}: " in error["message"] and place.startswith(error["param"])


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"max_completion_tokens": 999}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 999}, "max_tokens"),
        (CHAT, {"messages": say("1" * 99)}, "messages"),
        (CHAT, {"messages": say("hello")}, "messages"),
        (CHAT, {"temperature": 0.001}, "temperature"),
        (CHAT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (CHAT, {"min_tokens": 999}, "min_tokens"),
        (TEXT, {"prompt": [1] * 99}, "prompt"),
        (TEXT, {"prompt": "0" * 99_999}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
    ],
)
async def test_what_an_engine_would_refuse_has_the_name_of_the_field_that_was_sent(renderer, path, change, param):
    body = {CHAT: {"messages": say("1")}, TEXT: {"prompt": "1"}}[path]
    answer = await post(renderer, path, json.dumps({"model": MODEL, **body, **change}).encode())
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert "_new_tokens" not in answer.json()["error"]["message"]


async def test_what_is_not_said_to_be_json_is_a_400(renderer):
    assert (await post(renderer, TEXT, b"prompt=1", "text/plain")).status_code == 400


async def test_a_path_or_method_that_is_not_there_is_an_error_object(renderer):
    async with http(PlayedFleet(), renderer) as client:
        assert (await client.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
        assert (await client.get(TEXT)).status_code == 405


async def test_a_stream_counts_its_tokens_where_it_is_asked_to(renderer):
    whole = (await complete(PlayedFleet(), renderer, n=2)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = (await complete(PlayedFleet(), renderer, n=2, **options)).text.strip().split("\n\n")
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert usage == whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


async def test_a_model_whose_name_has_a_slash_is_found(renderer):
    app = app_over(PlayedFleet(), policy_of(renderer, 32, "org/policy"))
    async with http_client(app) as http:
        for name in ("org/policy", "org%2Fpolicy"):
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == "org/policy"
        missing = await http.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


LONG = 1 << 20


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "0" * LONG},
        {"prompt": ["0", "é" * LONG]},
        {"messages": [{"role": "user", "content": "0" * (LONG // 16)}] * 16},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "0" * LONG}]}]},
        {"messages": [{"role": "user", "content": "0"}, {"role": "assistant", "reasoning_content": "0" * LONG}]},
    ],
    ids=["text", "texts", "messages", "parts", "reasoning"],
)
async def test_a_text_that_cannot_fit_is_never_tokenized(renderer, body, monkeypatch):
    for name in ("encode", "render"):
        monkeypatch.setattr(renderer, name, lambda *given, **options: pytest.fail("a long text was tokenized"))
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    async with http(PlayedFleet(), renderer) as client:
        answer = await client.post(path, json={"model": MODEL, **body})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_body_of_wrong_entries_has_a_short_answer(renderer):
    """Each would have a sentence, and a million sentences hold up every client for a minute."""
    wrong = {"prompt": [-1] * 10_000}, {"messages": [{}] * 4096}, {f"field{each}": 1 for each in range(10_000)}
    for body in wrong:
        with pytest.raises(ValidationError) as problems:
            (ChatCompletionRequest if "messages" in body else CompletionRequest).model_validate({"model": "", **body})
        assert problems.value.error_count() < 10


async def test_no_depth_of_nesting_is_a_bug_of_ours(renderer):
    async with http(PlayedFleet(), renderer) as client:
        for depth in range(900, 1010, 3):
            deep = '{"a":' * depth + "1" + "}" * depth
            call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": deep}}
            said = {"role": "assistant", "tool_calls": [call]}
            answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": [said]})
            assert answer.status_code == 400, f"{depth}: {answer.text}"


async def test_a_bug_is_an_error_object_too(renderer):
    answer = await complete(PlayedFleet(ValueError("oops")), renderer)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "ValueError: oops"


async def test_every_attempt_has_an_id_of_its_own(renderer):
    fleet = PlayedFleet()
    for _ in range(2):
        await complete(fleet, renderer, n=2, seed=1)
    assert len({each.request_id for each in fleet.asked}) == 4


@pytest.mark.parametrize("logprob", [-np.inf, np.nan])
async def test_a_logprob_that_json_cannot_say_is_a_number(renderer, logprob):
    fleet = PlayedFleet()
    fleet.logprob = logprob
    answer = (await complete(fleet, renderer, logprobs=0)).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


async def test_a_fleet_without_generators_is_not_healthy(renderer):
    async with http(PlayedFleet(), renderer) as client:
        assert (await client.get("/health")).status_code == 503
    async with http(PlayedFleet(ActorFailed("router: gone")), renderer) as client:
        assert "router: gone" in (await client.get("/health")).json()["error"]["message"]


async def test_health_names_every_generator_and_why_it_does_not_serve(renderer):
    class Dead(PlayedFleet):
        async def fleet_status(self) -> list[SimpleNamespace]:
            return [
                SimpleNamespace(name="generator0", state=Phase.DEAD, last_error="was killed"),
                SimpleNamespace(name="generator1", state=Phase.RECOVERING, last_error=""),
            ]

    async with http(Dead(), renderer) as client:
        told = (await client.get("/health")).json()["error"]["message"]
    assert told == "no generator serves: generator0 is dead: was killed; generator1 is recovering"
    policy = policy_of(renderer, 32)
    async with http_client(app_over(Dead(), policy, ApiKeys(policy, "secret"))) as client:
        asked = [await client.get("/health", headers=headers) for headers in ({}, {"Authorization": "Bearer secret"})]
    stranger, friend = (each.json()["error"]["message"] for each in asked)
    assert stranger == "no generator serves: generator0 is dead; generator1 is recovering" and friend == told
    async with http_client(app_over(PlayedFleet(ActorFailed("at /secret")), policy, ApiKeys(policy, "x"))) as client:
        assert "secret" not in (await client.get("/health")).text


async def test_connections_that_send_nothing_are_cut_off_and_keep_nobody_from_being_served(renderer, monkeypatch):
    """300 of them, where 100 may be open; and a body that never comes."""
    monkeypatch.setattr(app, "MOST_CONNECTIONS", 100)
    monkeypatch.setattr(app, "HEAD_SECONDS", 2)
    monkeypatch.setattr(app, "BODY_SECONDS", 1)
    server = app.GatewayServer(GatewayConfig(port=0, model=MODEL), PlayedFleet(), policy_of(renderer, 32), run_seed=0)
    host, port = urlsplit(server.url).hostname, urlsplit(server.url).port
    try:
        silent = [await asyncio.open_connection(host, port) for _ in range(300)]
        for _, writer in silent[::2]:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost")
        async with asyncio.timeout(10), httpx.AsyncClient(base_url=server.url) as http:
            assert (await http.get("/v1/models")).status_code == 200
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        async with asyncio.timeout(20):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            for reader, _ in silent:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
    finally:
        await server.close()
        for _, each in [*silent, (reader, writer)]:
            each.close()


async def test_a_client_that_reads_nothing_is_cut_off(renderer, monkeypatch):
    def listen_with_small_buffers(*address, **options):
        listener = listen(*address, **options)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those of its connections too
        return listener

    monkeypatch.setattr(app, "listen", listen_with_small_buffers)
    monkeypatch.setattr(app, "STALLED_SECONDS", 1)
    server = app.GatewayServer(GatewayConfig(port=0, model=MODEL), PlayedFleet(), policy_of(renderer, 32), run_seed=0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
        client.setblocking(False)
        try:
            async with asyncio.timeout(60):
                with pytest.raises(ConnectionError):
                    while True:
                        calls = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 100
                        await asyncio.get_running_loop().sock_sendall(client, calls)
        finally:
            await server.close()


async def test_health_does_not_wait_for_a_router_that_does_not_answer(renderer, monkeypatch):
    class Silent(PlayedFleet):
        async def fleet_status(self) -> list[SimpleNamespace]:
            return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(app, "HEALTH_SECONDS", 0.1)
    async with http(Silent(), renderer) as client:
        answer = await client.get("/health")
    assert answer.status_code == 503 and "did not answer" in answer.json()["error"]["message"]


async def test_a_stranger_cannot_hold_a_connection_with_a_body(renderer):
    config = GatewayConfig(port=0, model=MODEL, api_key="secret")
    server = app.GatewayServer(config, PlayedFleet(), policy_of(renderer, 32), run_seed=0)
    reader, writer = await asyncio.open_connection(urlsplit(server.url).hostname, urlsplit(server.url).port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 503"), "answered though no body came"
    finally:
        await server.close()
        writer.close()


async def test_a_body_that_is_announced_as_far_too_long_is_refused_before_it_comes(renderer):
    server = app.GatewayServer(GatewayConfig(port=0, model=MODEL), PlayedFleet(), policy_of(renderer, 32), run_seed=0)
    reader, writer = await asyncio.open_connection(urlsplit(server.url).hostname, urlsplit(server.url).port)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    finally:
        await server.close()
        writer.close()


async def test_every_call_is_counted_by_what_became_of_it(renderer):
    fleet = PlayedFleet(ValueError("oops"), GeneratorFailed("x"))
    async with http(fleet, renderer) as client:
        for prompt in ("01", "01", "01", "x"):
            await client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
        await client.get("/v1/guess")
        metrics = (await client.get("/metrics")).text
    for status in (200, 400, 500, 503):
        assert f'calls_total{{path="/v1/completions",status="{status}"}} 1.0' in metrics
    assert 'calls_total{path="other",status="404"} 1.0' in metrics


KEY = "sk-right"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        (f"BEARER {KEY}", 200),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Bearer {KEY}x", 401),
        (f"Basic {KEY}", 401),
        (KEY, 401),
    ],
)
async def test_only_the_whole_key_as_a_bearers_lets_anybody_in(
    renderer: SymbolRenderer, header: str | None, status: int
) -> None:
    policy = policy_of(renderer, 64)
    async with http_client(app_over(None, policy, ApiKeys(policy, KEY))) as client:  # type: ignore[arg-type]
        answer = await client.get("/v1/models", headers={} if header is None else {"authorization": header})
    assert answer.status_code == status


async def test_where_there_is_no_key_nobody_needs_one(renderer: SymbolRenderer) -> None:
    policy = policy_of(renderer, 64)
    async with http_client(app_over(None, policy, ApiKeys(policy))) as client:  # type: ignore[arg-type]
        assert (await client.get("/v1/models")).status_code == 200
