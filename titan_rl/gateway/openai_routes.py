"""OpenAI's chat and text completions: a body in, a body or a stream of chunks out.

- The chunks of a choice, put together, are the choice that a client gets that does not stream.
- The first event waits for the first token, so a failure until then has a status of its own.
- A stream that has begun ends with `[DONE]`, whatever happens to it. An error is the event before.
"""

from __future__ import annotations

import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from titan_rl.errors import TitanError
from titan_rl.gateway.callers import CALLER, Caller
from titan_rl.gateway.calls import ApiError, Delta, ServedPolicy, api_error
from titan_rl.gateway.json_route import JsonRoute
from titan_rl.gateway.openai_protocol import ChatCompletionRequest, CompletionRequest
from titan_rl.gateway.sampling import Sampler
from titan_rl.types import ToolCall

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def routes(sampler: Sampler) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=JsonRoute)
    name = sampler.policy.name
    listed = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "titan_rl"}
    listed["max_model_len"] = sampler.policy.max_model_len  # as vLLM's server tells it

    def check_model(model: str) -> None:
        if model != name:
            problem = f"there is no model {model!r}; this gateway serves {name!r}"
            raise ApiError(404, problem, param="model", code="model_not_found")

    async def respond(answer: OpenAIAnswer, caller: Caller) -> Response:
        check_model(answer.body.model)
        if answer.body.stream:
            return EventStream(_events(sampler, answer, caller))
        deltas = await sampler.whole(answer.call, caller)
        return JsonResponse(answer.whole([answer.choice(delta) for delta in deltas]))

    @router.post("/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """What the policy says next in a conversation."""
        return await respond(ChatAnswer(body, sampler.policy), request.scope[CALLER])

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """How the policy goes on with texts or token ids."""
        return await respond(TextAnswer(body, sampler.policy), request.scope[CALLER])

    @router.get("/models")
    async def models() -> Response:
        """The one model there is."""
        return JsonResponse({"object": "list", "data": [listed]})

    @router.get("/models/{model:path}")
    async def model(model: str) -> Response:
        """The one model there is."""
        check_model(model)
        return JsonResponse(listed)

    return router


async def _events(sampler: Sampler, answer: OpenAIAnswer, caller: Caller) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with aclosing(sampler.stream(answer.call, caller)) as deltas:
            async for delta in deltas:
                yield b"".join(map(_event, answer.chunks(delta)))
                begun = True
        if answer.body.stream_options is not None and answer.body.stream_options.include_usage:
            yield _event({**answer.chunk([]), "usage": answer.usage})
    except (ApiError, TitanError) as error:
        if not begun:
            raise
        yield _event(error_object(api_error(error)))
    yield DONE


def _event(content: Json) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


def error_object(error: ApiError) -> Json:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "authentication_error" if error.status == 401 else kind
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class OpenAIAnswer(ABC):
    kinds: ClassVar[tuple[str, str, str]]
    """What an answer, a chunk and the call's id are called."""

    def __init__(self, body: ChatCompletionRequest | CompletionRequest, policy: ServedPolicy) -> None:
        self.body = body
        self.call = body.call(f"{self.kinds[2]}-{uuid.uuid4().hex}")
        self._head = {"id": self.call.id, "created": int(time.time()), "model": policy.name}

    @property
    def usage(self) -> Json:
        return {**self.call.usage, "total_tokens": self.call.usage.total()}

    def whole(self, choices: Sequence[Json]) -> Json:
        return {**self._head, "object": self.kinds[0], "choices": choices, "usage": self.usage}

    def chunk(self, choices: Sequence[Json]) -> Json:
        return {**self._head, "object": self.kinds[1], "choices": choices}

    @abstractmethod
    def choice(self, delta: Delta) -> Json:
        """What a delta adds to its choice; the whole choice where it is the only one."""

    def chunks(self, delta: Delta) -> list[Json]:
        return [self.chunk([self.choice(delta)])]

    def _choice_json(self, delta: Delta, content: Json, logprobs: Json | None) -> Json:
        reason = None
        if (choice := delta.choice) is not None:
            reason = "tool_calls" if choice.message.tool_calls else "stop" if choice.stopped else "length"
        written = {"index": delta.index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**written, "token_ids": delta.tokens} if self.body.return_token_ids else written


class TextAnswer(OpenAIAnswer):
    kinds = ("text_completion", "text_completion", "cmpl")

    def __init__(self, body: CompletionRequest, policy: ServedPolicy) -> None:
        super().__init__(body, policy)
        self._written: dict[int, TokenPlaces] = {}

    def choice(self, delta: Delta) -> Json:
        content: Json = {"text": delta.text}
        if delta.first and self.body.return_token_ids:
            content["prompt_token_ids"] = delta.prompt
        return self._choice_json(delta, content, None if self.body.logprobs is None else self._logprobs(delta))

    def _logprobs(self, delta: Delta) -> Json:
        sampled = [*zip(map(token_text, delta.token_bytes), delta.logprobs, strict=True)]
        tops = [{token_text(token): logprob for token, logprob in top} for top in delta.top_logprobs]
        return {
            "tokens": [text for text, _ in sampled],
            "token_logprobs": delta.logprobs,
            "top_logprobs": [top | dict([one]) for top, one in zip(tops, sampled, strict=True)] if tops else None,
            "text_offset": [*map(self._written.setdefault(delta.index, TokenPlaces()).add, delta.token_bytes)],
        }


class ChatAnswer(OpenAIAnswer):
    kinds = ("chat.completion", "chat.completion.chunk", "chatcmpl")
    _prompt: Sequence[int] = ()

    def whole(self, choices: Sequence[Json]) -> Json:
        more = {"prompt_token_ids": self._prompt} if self.body.return_token_ids else {}
        return {**super().whole(choices), **more}

    def choice(self, delta: Delta) -> Json:
        assert delta.choice is not None
        self._prompt = delta.prompt
        message = delta.choice.message
        content: Json = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning:
            content["reasoning_content"] = message.reasoning
        if message.tool_calls:
            content["tool_calls"] = self._calls(delta.index, message.tool_calls)
            content["content"] = message.content or None
        return self._choice_json(delta, {"message": content}, self._logprobs(delta))

    def chunks(self, delta: Delta) -> list[Json]:
        content: Json = {"role": "assistant", "content": ""} if delta.first else {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.text:
            content["content"] = delta.text
        if delta.calls:
            calls = self._calls(delta.index, delta.calls, delta.first_call)
            content["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls, delta.first_call)]
        if delta.choice is None:
            return [self._chunk(delta, content)]
        last = self._chunk(replace(delta, tokens=[], token_bytes=[], logprobs=[], top_logprobs=[]), {})
        return [self._chunk(replace(delta, choice=None), content), last] if content or delta.tokens else [last]

    def _chunk(self, delta: Delta, content: Json) -> Json:
        return self.chunk([self._choice_json(delta, {"delta": content}, self._logprobs(delta))])

    def _calls(self, index: int, calls: Sequence[ToolCall], first: int = 0) -> list[Json]:
        return [
            {
                "id": call.id or f"call-{self.call.id}-{index}-{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls, first)
        ]

    def _logprobs(self, delta: Delta) -> Json | None:
        if not self.body.logprobs:
            return None
        tops = delta.top_logprobs or [[] for _ in delta.tokens]
        sampled = zip(delta.token_bytes, delta.logprobs, tops, strict=True)
        return {
            "content": [
                {**_token_logprob(token, logprob), "top_logprobs": [_token_logprob(*each) for each in top]}
                for token, logprob, top in sampled
            ]
        }


def _token_logprob(token: bytes, logprob: float) -> Json:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token)}


def token_text(token: bytes) -> str:
    """Bytes that are no character by themselves are written as `\\xf0`, as OpenAI does."""
    return token.decode(errors="backslashreplace")


class TokenPlaces:
    """Where in its text each token of a completion begins; one that goes on with a character, where that begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def add(self, token: bytes) -> int:
        pending, _ = self._decoder.getstate()
        place = self._length + bool(pending and token and not 0x80 <= token[0] < 0xC0)  # it will never be a character
        self._length += len(self._decoder.decode(token))
        return place


class JsonResponse(JSONResponse):
    """JSON in ASCII: text of a client that comes back in an error may hold what UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream(Response):
    """Server-sent events. However the response ends, `events` is closed, and with it the engine work behind it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            body = await anext(events)  # what fails before it is answered with a status of its own
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def to_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
