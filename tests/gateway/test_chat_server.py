"""Any server with OpenAI's chat API as a policy, over real sockets (milliseconds)."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from titan_rl.errors import AbsentError, ConfigError, GeneratorFailed, RequestError
from titan_rl.gateway.openai_client import RETRIES, ChatServer
from titan_rl.types import FinishReason, GenerationRequest, Message, SamplingParams, ToolCall, ToolSpec

ADD = ToolSpec("add", "adds", {"type": "object", "properties": {"first": {"type": "integer"}}})
REQUEST = GenerationRequest(
    request_id="one",
    prompt_token_ids=np.zeros(1, np.int32),
    sampling=SamplingParams(max_new_tokens=7, temperature=0.5),
    seed=(1 << 40) + 3,
)
MODELS = (200, {"data": [{"id": "small"}]})


@contextmanager
def server(*answers, models=MODELS) -> Iterator[tuple[str, list]]:
    """Gives one (status, body) or (status, body, bytes that are missing at its end) after the other; collects what it
    is asked."""
    asked: list = []
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            asked.append((self.path, self.headers.get("authorization"), body))
            status, told, *missing = models if self.path.endswith("/models") else left.pop(0)
            text = (told if isinstance(told, str) else json.dumps(told)).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text) + sum(missing)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = answer

        def log_message(self, *words):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", asked
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def said(content=None, finish="stop", **more):
    return 200, {"choices": [{"message": {"role": "assistant", "content": content, **more}, "finish_reason": finish}]}


def called(arguments: str):
    return [{"id": "abc", "type": "function", "function": {"name": "add", "arguments": arguments}}]


async def test_a_conversation_with_tools_travels_as_the_api_has_it_and_comes_back_as_messages():
    conversation = [
        Message("system", "be brief"),
        Message("user", "5+1=", name="ann"),
        Message("assistant", "", (ToolCall("add", {"first": 5}), ToolCall("add", {"first": 6}, id="mine"))),
        Message("tool", "6"),
        Message("tool", "7"),
        Message("assistant", "hm", (ToolCall("add", {}, "it cannot be read", "add(5"),)),
    ]
    with server(said("six", tool_calls=called('{"first": 5}'), reasoning_content="so")) as (url, asked):
        policy = ChatServer(url, api_key="secret")
        message, reason = await policy.next_message(conversation, [ADD], REQUEST)
    assert message == Message("assistant", "six", (ToolCall("add", {"first": 5}, id="abc"),), reasoning="so")
    assert reason is FinishReason.STOP
    path, key, body = asked[1]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    names = ("model", "max_tokens", "temperature", "seed")
    assert [body[name] for name in names] == ["small", 7, 0.5, 3]
    assert body["tools"] == [{"type": "function", "function": ADD._asdict()}]
    calls = body["messages"][2]["tool_calls"]
    assert [call["id"] for call in calls] == ["call-2-0", "mine"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"first": 5}, {"first": 6}]
    assert [message.get("tool_call_id") for message in body["messages"][3:]] == ["call-2-0", "mine", None]
    assert body["messages"][5] == {"role": "assistant", "content": "hmadd(5"}
    assert body["messages"][1]["name"] == "ann"


async def test_a_turn_that_was_cut_off_says_so_and_a_call_without_an_object_has_a_problem():
    with server(said("fiv", "length"), said(tool_calls=called("[5"))) as (url, _):
        policy = ChatServer(url, model="big")
        assert await policy.next_message([], [], REQUEST) == (Message("assistant", "fiv"), FinishReason.LENGTH)
        message, _ = await policy.next_message([], [ADD], REQUEST)
    (call,) = message.tool_calls
    assert call.problem.startswith("the arguments of add must be a JSON object") and call.raw == "add([5)"


async def test_an_answer_in_parts_is_their_text_and_one_that_breaks_off_is_asked_for_again():
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    with server((200, "{", 5), said(parts), said(5)) as (url, _):
        policy = ChatServer(url)
        assert (await policy.next_message((), (), REQUEST))[0] == Message("assistant", "12")
        with pytest.raises(GeneratorFailed, match="answered no chat completion"):
            await policy.next_message((), (), REQUEST)


async def test_a_busy_server_is_asked_again_but_not_for_ever():
    busy = (429, {"error": {"message": "slow down"}})
    with server(busy, busy, said("at last")) as (url, asked):
        policy = ChatServer(url, model="big")
        assert (await policy.next_message([], [], REQUEST))[0].content == "at last"
        assert len(asked) == 1 + 3
    with server(*[busy] * (1 + RETRIES)) as (url, _):
        policy = ChatServer(url, model="big")
        with pytest.raises(GeneratorFailed, match=r"refuses \(429\): slow down"):
            await policy.next_message([], [], REQUEST)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            (400, {"error": {"message": "too long"}}),
            RequestError,
            r"refuses \(400\): too long; \d+ tokens .*\.max_new_tokens",
        ),
        ((401, "who are you"), GeneratorFailed, r"refuses \(401\): who are you"),
        ((200, {"choices": []}), GeneratorFailed, "answered no chat completion"),
        ((200, "<html>"), GeneratorFailed, "cannot be asked"),
    ],
)
async def test_what_a_server_refuses_is_an_error_that_says_what_it_said(answer, kind, words):
    with server(answer) as (url, _):
        policy = ChatServer(url, model="big")
        with pytest.raises(kind, match=words):
            await policy.next_message([], [], REQUEST)


@pytest.mark.parametrize("answer", [(200, {"data": []}), (404, "no")])
def test_a_server_without_a_model_is_refused_before_anything_is_played(answer):
    with server(models=answer) as (url, _):
        with pytest.raises(ConfigError):
            ChatServer(url)


def test_without_openais_client_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(AbsentError, match=r"pip install 'titan-rl\[agents\]'"):
        ChatServer("http://127.0.0.1:9/v1")


TOO_LONG = (400, {"error": {"message": "too long"}})


@pytest.mark.parametrize(
    ("length", "answers", "limits"),
    [(8, [said("1")], [7]), (7, [said("1")], [None]), (8, [TOO_LONG, said("1")], [7, None])],
)
async def test_a_server_that_tells_its_length_is_asked_for_no_more_than_it_has(length, answers, limits):
    with server(*answers, models=(200, {"data": [{"id": "small", "max_model_len": length}]})) as (url, asked):
        assert (await ChatServer(url).next_message([], [], REQUEST))[0].content == "1"
    assert [body.get("max_tokens") for _, _, body in asked[1:]] == limits


def test_a_model_that_is_named_need_not_be_listed_but_the_server_has_to_answer():
    with server(models=(404, "no")) as (url, _):
        assert ChatServer(url, model="big").model == "big"
    with pytest.raises(ConfigError, match="cannot be asked"):
        ChatServer(url, model="big")
