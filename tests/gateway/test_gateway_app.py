"""The app alone, over a fleet that the test plays (1 s)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from pydantic import ValidationError
from support.gateway import MODEL, app_over, http_client, policy_of

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.errors import ActorFailed, GeneratorFailed, RequestLost, RequestTimeout
from titan_rl.gateway import app
from titan_rl.gateway.callers import ApiKeys
from titan_rl.gateway.config import GatewayConfig
from titan_rl.gateway.openai_protocol import ChatCompletionRequest, CompletionRequest
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece


class PlayedFleet:
    """Fails as often as it is told to, then answers with the prompt; remembers every request id."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors
        self.ids: list[str] = []
        self.reason = FinishReason.LENGTH
        self.logprob = -np.inf

    async def generate(self, request: GenerationRequest) -> Completion:
        self.ids.append(request.request_id)
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

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
        completion = await self.generate(request)
        yield Piece(
            request_id=request.request_id,
            offset=0,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
        )
        yield completion

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
        (RequestTimeout("not finished after 5 s"), 504),
    ],
    ids=str,
)
async def test_a_failure_of_the_fleet_is_a_5xx_with_its_cause(renderer, error, status, stream):
    answer = await complete(PlayedFleet([error]), renderer, stream=stream)
    assert answer.status_code == status
    assert str(error) in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-should-retry"] == "false"


async def test_a_completion_that_somebody_else_aborted_is_a_503(renderer):
    fleet = PlayedFleet([])
    fleet.reason = FinishReason.ABORT
    assert (await complete(fleet, renderer)).status_code == 503


async def test_a_failure_after_the_first_choice_is_an_event_before_the_streams_end(renderer):
    fleet = PlayedFleet([])

    class Second(PlayedFleet):
        async def generate(self, request: GenerationRequest) -> Completion:
            if request.request_id.endswith("-1"):
                raise GeneratorFailed("generator0 died")
            return await fleet.generate(request)

    answer = await complete(Second([]), renderer, n=2, stream=True)
    assert answer.status_code == 200
    failure, end = answer.text.split("\n\n")[-3:-1]
    assert "generator0 died" in failure
    assert end == "data: [DONE]"


async def test_a_failure_after_the_first_tokens_is_an_event_before_the_streams_end(renderer):
    class Half(PlayedFleet):
        async def stream(self, request: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
            async for each in super().stream(request):
                yield each
                await asyncio.sleep(0)  # the first tokens are on their way
                raise GeneratorFailed("generator0 died")

    answer = await complete(Half([]), renderer, stream=True)
    assert answer.status_code == 200
    *told, end = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    first, last = map(json.loads, told)
    assert first["choices"][0]["text"] == "01"
    assert "generator0 died" in last["error"]["message"]
    assert end == "[DONE]"


async def test_a_model_whose_name_has_a_slash_is_found(renderer):
    app = app_over(PlayedFleet([]), policy_of(renderer, 32, "org/policy"))
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
    async with http(PlayedFleet([]), renderer) as client:
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
    async with http(PlayedFleet([]), renderer) as client:
        for depth in range(900, 1010, 3):
            deep = '{"a":' * depth + "1" + "}" * depth
            call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": deep}}
            said = {"role": "assistant", "tool_calls": [call]}
            answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": [said]})
            assert answer.status_code == 400, f"{depth}: {answer.text}"


async def test_a_bug_is_an_error_object_too(renderer):
    answer = await complete(PlayedFleet([ValueError("oops")]), renderer)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "ValueError: oops"


async def test_every_attempt_has_an_id_of_its_own(renderer):
    fleet = PlayedFleet([])
    for _ in range(2):
        await complete(fleet, renderer, n=2, seed=1)
    assert len(set(fleet.ids)) == 4


@pytest.mark.parametrize("logprob", [-np.inf, np.nan])
async def test_a_logprob_that_json_cannot_say_is_a_number(renderer, logprob):
    fleet = PlayedFleet([])
    fleet.logprob = logprob
    answer = (await complete(fleet, renderer, logprobs=0)).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


async def test_a_fleet_without_generators_is_not_healthy(renderer):
    async with http(PlayedFleet([]), renderer) as client:
        assert (await client.get("/health")).status_code == 503
    async with http(PlayedFleet([ActorFailed("router: gone")]), renderer) as client:
        assert "router: gone" in (await client.get("/health")).json()["error"]["message"]


async def test_health_names_every_generator_and_why_it_does_not_serve(renderer):
    class Dead(PlayedFleet):
        async def fleet_status(self) -> list[SimpleNamespace]:
            return [
                SimpleNamespace(name="generator0", state="dead", last_error="was killed"),
                SimpleNamespace(name="generator1", state="recovering", last_error=""),
            ]

    async with http(Dead([]), renderer) as client:
        told = (await client.get("/health")).json()["error"]["message"]
    assert told == "no generator serves: generator0 is dead: was killed; generator1 is recovering"
    policy = policy_of(renderer, 32)
    async with http_client(app_over(Dead([]), policy, ApiKeys(policy, "secret"))) as client:
        asked = [await client.get("/health", headers=headers) for headers in ({}, {"Authorization": "Bearer secret"})]
    stranger, friend = (each.json()["error"]["message"] for each in asked)
    assert stranger == "no generator serves: generator0 is dead; generator1 is recovering" and friend == told
    async with http_client(app_over(PlayedFleet([ActorFailed("at /secret")]), policy, ApiKeys(policy, "x"))) as client:
        assert "secret" not in (await client.get("/health")).text


async def test_connections_that_send_nothing_are_cut_off_and_keep_nobody_from_being_served(renderer, monkeypatch):
    """300 of them, where 100 may be open; and a body that never comes."""
    monkeypatch.setattr(app, "MOST_CONNECTIONS", 100)
    monkeypatch.setattr(app, "HEAD_SECONDS", 2)
    monkeypatch.setattr(app, "BODY_SECONDS", 1)
    server = app.GatewayServer(GatewayConfig(port=0, model=MODEL), PlayedFleet([]), policy_of(renderer, 32), run_seed=0)
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


async def test_a_stranger_cannot_hold_a_connection_with_a_body(renderer):
    config = GatewayConfig(port=0, model=MODEL, api_key="secret")
    server = app.GatewayServer(config, PlayedFleet([]), policy_of(renderer, 32), run_seed=0)
    reader, writer = await asyncio.open_connection(urlsplit(server.url).hostname, urlsplit(server.url).port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 503"), "answered though no body came"
    finally:
        await server.close()
        writer.close()


async def test_every_call_is_counted_by_what_became_of_it(renderer):
    fleet = PlayedFleet([ValueError("oops"), GeneratorFailed("x")])
    async with http(fleet, renderer) as client:
        for prompt in ("01", "01", "01", "x"):
            await client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
        await client.get("/v1/guess")
        metrics = (await client.get("/metrics")).text
    for status in (200, 400, 500, 503):
        assert f'calls_total{{path="/v1/completions",status="{status}"}} 1.0' in metrics
    assert 'calls_total{path="other",status="404"} 1.0' in metrics
