"""What comes over the wire is exact, and says what is wrong: over a fleet that the test plays (5 s)."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway import MODEL, ScriptedFleet, app_over, http_client, policy_of, session_request
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from titan_rl.chat import make_renderer
from titan_rl.chat.chat_renderer import ChatRenderer, PlainTokenizer
from titan_rl.chat.renderer import Renderer
from titan_rl.gateway import app, bodies
from titan_rl.gateway.callers import ApiKeys, RolloutKeys
from titan_rl.gateway.config import GatewayConfig
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import TOP, Completion, FinishReason, GenerationRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
SAID = "h€😀\n<think> é"
USER = [{"role": "user", "content": "1"}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Qwen3's format; a token is a byte."""
    return make_renderer("auto", make_tiny_policy(TinyPolicyConfig(tokenizer="chat"), tmp_path_factory.mktemp("chat")))


class TellingFleet(ScriptedFleet):
    """Says these tokens. The likeliest are the one before it in the vocabulary, itself, and one that is impossible; so
    they are in a prompt."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        count, asked = len(self._tokens), request.sampling.top_logprobs

        def top(token: int) -> list[tuple[int, float]]:
            return [(token - 1, -0.25), (token, -1.5), (0, -np.inf)][:asked]

        prompt = [[(token, -1.5), *top(token)] for token in request.prompt_token_ids[1:].tolist()]
        return Completion(
            request_id=request.request_id,
            token_ids=np.array(self._tokens, np.int32),
            logprobs=np.full(count, -1.5, np.float32),
            versions=np.zeros(count, np.int64),
            finish_reason=FinishReason.LENGTH,
            top_logprobs=np.array([*map(top, self._tokens)], TOP) if asked else None,
            prompt_logprobs=np.array(prompt, TOP) if request.sampling.prompt_logprobs else None,
        )


async def ask(renderer: Renderer, tokens: list[int], path: str, **body: Any) -> list[dict[str, Any]]:
    """The choices of all chunks; without `stream`, the choice."""
    body = {"model": MODEL, **({"messages": USER} if path == CHAT else {"prompt": "1"}), **body}
    async with http_client(app_over(TellingFleet(tokens), policy_of(renderer, 512))) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()["choices"]
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(event)["choices"][0] for event in events[:-1]]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bytes_of_tokens_are_those_of_the_text(chat, stream):
    tokens = chat.encode(SAID)
    assert len(tokens) == len(SAID.encode()) - len("<think>") + 1
    choices = await ask(chat, tokens, CHAT, stream=stream, logprobs=True)
    told = [each for choice in choices for each in choice["logprobs"]["content"]]
    assert b"".join(bytes(each["bytes"]) for each in told) == SAID.encode()
    assert [each["token"] for each in told][:4] == ["h", "\\xe2", "\\x82", "\\xac"]
    assert all(each["top_logprobs"] == [] for each in told)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_places_of_tokens_are_those_of_the_text(chat, stream):
    tokens = chat.encode(SAID)
    choices = await ask(chat, tokens, TEXT, stream=stream, logprobs=0)
    places = [place for choice in choices for place in choice["logprobs"]["text_offset"]]
    assert "".join(choice["text"] for choice in choices) == SAID
    whole = [
        len(b"".join(map(chat.token_bytes, tokens[:count])).decode(errors="ignore")) for count in range(len(tokens))
    ]
    assert places == whole and places[-1] == len(SAID) - 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 257), max_size=12))
def test_bytes_of_any_tokens_joined_read_as_their_text(chat, tokens):
    assert b"".join(map(chat.token_bytes, tokens)).decode(errors="replace") == chat.decode(tokens)


def test_tokens_of_other_tokenizers_have_their_own_bytes_too(tmp_path):
    """One that writes spaces as ▁, drops the first one of a text, and spells what it does not know in bytes."""
    vocabulary = ["<unk>", "</s>", "▁", "▁a", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = BPE({name: place for place, name in enumerate(vocabulary)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    Path(tmp_path, "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    renderer = ChatRenderer.__new__(ChatRenderer)
    renderer._tokenizer = PlainTokenizer(tmp_path)
    tokens = [3, 2, 4, *(5 + byte for byte in "😀".encode()), 1]
    assert renderer.decode(tokens) == "a é😀</s>"
    assert b"".join(map(renderer.token_bytes, tokens)) == " a é😀</s>".encode()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_likeliest_tokens_are_told_where_they_are_asked_for(chat, stream):
    tokens = chat.encode("b")
    choice, *_ = await ask(chat, tokens, CHAT, logprobs=True, top_logprobs=3, stream=stream)
    (told,) = choice["logprobs"]["content"]
    one, other = (
        {"token": name, "logprob": number, "bytes": [ord(name)]} for name, number in (("a", -0.25), ("b", -1.5))
    )
    assert told == {**other, "top_logprobs": [one, other]}, "without the impossible one"
    choice, *_ = await ask(chat, tokens, TEXT, logprobs=1, stream=stream)
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.25, "b": -1.5}], "the sampled one is always among them"
    (choice,) = await ask(chat, tokens, TEXT, logprobs=0)
    assert choice["logprobs"]["top_logprobs"] is None


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice of these chunks."""
    logprobs = {
        name: [each for choice in choices for each in choice["logprobs"][name]] for name in choices[0]["logprobs"]
    }
    return {"text": "".join(choice["text"] for choice in choices), **logprobs}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("most", [0, 5])
async def test_an_echoed_prompt_is_told_like_what_was_sampled(chat, stream, as_ids, most):
    prompt, said = "xé", chat.encode("b€o")[: most or 1]
    ids = [*chat.encode(prompt), *said[:most]]
    options = {"echo": True, "logprobs": 1, "stream": stream, "max_tokens": most}
    told = joined(await ask(chat, said, TEXT, prompt=chat.encode(prompt) if as_ids else prompt, **options))
    assert told["text"] == chat.decode(ids)
    assert told["tokens"] == ["x", "\\xc3", "\\xa9", *(["b", "\\xe2", "\\x82", "\\xac", "o"] if most else [])]
    assert told["token_logprobs"] == [None, *[-1.5] * (len(ids) - 1)], "nothing precedes the first"
    assert told["top_logprobs"][0] is None and told["top_logprobs"][2] == {"\\xa8": -0.25, "\\xa9": -1.5}
    assert list(told["top_logprobs"][2]) == ["\\xa9", "\\xa8"], "harnesses take the first of equal ones as likeliest"
    assert told["text_offset"] == [0, 1, 1, *([2, 3, 3, 3, 4] if most else [])]


async def test_no_character_goes_from_the_prompt_over_to_what_was_sampled(chat):
    first, second = chat.encode("é")
    told = joined(await ask(chat, [second, *chat.encode("b")], TEXT, prompt=[first], echo=True, logprobs=1))
    assert (told["text"], told["text_offset"]) == ("\ufffd\ufffdb", [0, 1, 2])


async def test_every_choice_echoes_its_prompt_and_only_sampled_tokens_count_as_completion(chat):
    body = {"model": MODEL, "prompt": ["ab", "c"], "n": 2, "echo": True, "max_tokens": 0, "return_token_ids": True}
    async with http_client(app_over(TellingFleet(chat.encode("z")), policy_of(chat, 512))) as http:
        answer = (await http.post(TEXT, json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "c", "c"]
    assert {(choice["finish_reason"], *choice["token_ids"]) for choice in answer["choices"]} == {("length",)}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert [
        choice["text"] for choice in await ask(chat, chat.encode("z"), TEXT, prompt=chat.encode("é"), echo=True)
    ] == ["éz"]


async def test_what_cannot_be_echoed_is_refused_by_name(chat):
    fleet, policy = TellingFleet(chat.encode("b")), policy_of(chat, 512)
    keys = RolloutKeys(policy, base_url="http://gateway/v1", run_seed=1)
    key = (await keys.open(session_request("s"))).api_key
    body = {"model": MODEL, "prompt": "1", "max_tokens": 0}
    async with http_client(app_over(fleet, policy)) as anybody, http_client(app_over(fleet, policy, keys), key) as run:
        answers = [await anybody.post(TEXT, json=body), await run.post(TEXT, json={**body, "echo": True})]
        scored = await run.post(TEXT, json={**body, "echo": True, "logprobs": 0, "max_tokens": 1})
    for answer, said in zip(answers, ["unless echo is true", "a turn of a rollout has at least one"], strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "max_tokens")
        assert error["message"].startswith("max_tokens: ") and said in error["message"]
    assert scored.json()["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5]


async def test_a_runs_program_may_ask_for_them_and_draws_as_the_run_does(chat):
    fleet, policy = TellingFleet(chat.encode("b")), policy_of(chat, 512)
    keys = RolloutKeys(policy, base_url="http://gateway/v1", run_seed=1)
    key = (await keys.open(session_request("s"))).api_key
    for asked in (0, 2):
        body = {"model": MODEL, "prompt": "1", "temperature": 0.5, "logprobs": asked}
        async with http_client(app_over(fleet, policy, keys), key) as http:
            assert (await http.post(TEXT, json=body)).status_code == 200
    assert [request.sampling.top_logprobs for request in fleet.asked] == [0, 2]
    assert {request.sampling.temperature for request in fleet.asked} == {1.0}


# Errors.


BODY = json.dumps({"model": MODEL, "prompt": "1"}).encode()


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "said"),
    [
        ("GET", "/v1/nothing", {}, b"", 404, "GET /v1/nothing: there is no such path"),
        ("POST", "/nothing", JSON, BODY, 404, "POST /nothing: there is no such path"),
        ("GET", TEXT, {}, b"", 405, f"GET {TEXT}: it takes POST"),
        ("POST", TEXT, {"content-type": "text/plain"}, BODY, 400, "content-type 'text/plain': send JSON"),
        ("POST", TEXT, {}, BODY, 400, "content-type '': send JSON"),
        (
            "POST",
            TEXT,
            {**JSON, "content-encoding": "gzip"},
            gzip.compress(BODY, mtime=0),
            400,
            "content-encoding 'gzip'",
        ),
        ("POST", TEXT, JSON, BODY[:-5], 400, "is no JSON: EOF while parsing a value at line 1 column 29"),
        ("POST", TEXT, {"content-type": "application/vnd.x+json; charset=utf-8"}, BODY, 200, ""),
    ],
)
async def test_what_is_wrong_with_a_call_is_said_in_a_sentence(chat, method, path, headers, body, status, said):
    async with http_client(app_over(TellingFleet([70]), policy_of(chat, 512))) as http:
        answer = await http.request(method, path, headers=headers, content=body)
    assert answer.status_code == status
    if status != 200:
        assert said in answer.json()["error"]["message"]


async def test_every_answer_has_an_id_and_a_clients_own_if_it_is_harmless(chat):
    policy = policy_of(chat, 512)

    class Broken(TellingFleet):
        async def generate(self, request: GenerationRequest) -> Completion:
            raise ValueError("oops")

    async with http_client(app_over(Broken([70]), policy, ApiKeys(policy, "k"))) as http:
        key = {"authorization": "Bearer k"}
        seen = set()
        for path, headers, status in (
            ("/v1/models", {}, 401),
            ("/v1/models", key, 200),
            ("/v1/nothing", key, 404),
            (TEXT, {**key, **JSON}, 500),
        ):
            answer = await http.request("POST" if path == TEXT else "GET", path, headers=headers, content=BODY)
            assert answer.status_code == status
            seen.add(answer.headers["x-request-id"])
            again = await http.get(path, headers={**headers, "x-request-id": "trace-1.2:3"})
            assert again.headers["x-request-id"] == "trace-1.2:3"
            for harmful in ("a b", "x" * 129, "é", ""):
                given = {**headers, "x-request-id": harmful.encode("latin-1")}
                assert len((await http.get(path, headers=given)).headers["x-request-id"]) == 32
        assert len(seen) == 4


async def test_the_api_is_described_as_it_is(chat):
    async with http_client(app_over(TellingFleet([70]), policy_of(chat, 512))) as http:
        described = (await http.get("/openapi.json")).json()
        metrics = await http.get("/metrics")
    for path, methods in described["paths"].items():
        for operation in methods.values():
            answers = operation["responses"]
            assert {"200", "400", "401", "404", "405", "413", "503"} <= answers.keys() and "422" not in answers, path
    (kind,) = described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert metrics.headers["content-type"].startswith(kind) and kind == "text/plain"
    streams = {
        path.replace("{model}", MODEL)
        for path, methods in described["paths"].items()
        for operation in methods.values()
        if "text/event-stream" in operation["responses"]["200"]["content"]
    }
    gemini = {f"/{version}/models/{MODEL}:streamGenerateContent" for version in ("v1", "v1beta")}
    assert streams == {CHAT, TEXT, "/v1/responses", "/v1/messages", *gemini}
    seed, _ = described["components"]["schemas"]["ChatCompletionRequest"]["properties"]["seed"]["anyOf"]
    assert (seed["minimum"], seed["maximum"]) == (-(2**63), 2**63 - 1)
    assert "HTTPValidationError" not in json.dumps(described)


async def test_pages_of_other_origins_may_call_only_where_a_setting_says_so(chat):
    policy = policy_of(chat, 512)
    asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
    for origins, status, allowed in (((), 401, None), (("https://a.example",), 200, "https://a.example")):
        config = GatewayConfig(model=MODEL, cors_origins=origins)
        async with http_client(app.build_app(config, TellingFleet([70]), policy, ApiKeys(policy, "k"))) as http:
            preflight = await http.options(TEXT, headers=asks)
            refused = await http.post(TEXT, headers={"origin": "https://a.example"})
        assert preflight.status_code == status
        assert preflight.headers.get("access-control-allow-origin") == allowed
        assert refused.status_code == 401 and refused.headers.get("access-control-allow-origin") == allowed


# Fairness, over real sockets.


async def test_who_parses_a_long_body_keeps_nobody_waiting(chat, monkeypatch):
    begun, go_on = asyncio.Event(), threading.Event()
    loop, parse = asyncio.get_running_loop(), bodies.from_json

    def slow(body: bytes) -> Any:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(60)
        return parse(body)

    monkeypatch.setattr(bodies, "from_json", slow)
    server = app.GatewayServer(GatewayConfig(port=0, model=MODEL), TellingFleet([70]), policy_of(chat, 512), run_seed=0)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            long = asyncio.create_task(http.post(TEXT, json={"model": MODEL, "prompt": [70] * 2_000_000}))
            await begun.wait()
            assert (await http.get("/v1/models")).status_code == 200
            go_on.set()
            answer = await long
    finally:
        go_on.set()
        await server.close()
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": [70] * 2_000_000}, "2000000 prompt tokens do not fit"),
        ({"prompt": [[70], [70] * 512]}, "512 prompt tokens do not fit"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4096}] * 40}, "not 163840"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 128}] * 33}, "not 4224"),
        ({"contents": [{"parts": [{"text": "a"}] * 4096}] * 40}, "not 163840"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 4096}] * 40}, "not 163840"),
    ],
    ids=["ids", "several", "parts", "calls", "gemini", "responses"],
)
async def test_what_is_too_long_is_refused_before_it_is_read(chat, body, said, monkeypatch):
    for name in ("encode", "render", "decode"):
        monkeypatch.setattr(chat, name, lambda *given, **options: pytest.fail("it was read"))
    fleet = TellingFleet([70])
    async with http_client(app_over(fleet, policy_of(chat, 512))) as http:
        paths = {"messages": CHAT, "prompt": TEXT, "input": "/v1/responses"}
        paths["contents"] = f"/v1beta/models/{MODEL}:generateContent"
        answer = await http.post(paths[next(iter(body))], json={"model": MODEL, **body})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert fleet.asked == []
