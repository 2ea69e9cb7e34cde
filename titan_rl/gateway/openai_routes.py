"""OpenAI's chat and text completions: a body in, a body or a stream of chunks out. Any stream ends with `[DONE]`."""

import codecs
import json
import time
import uuid
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from titan_rl.gateway.answers import Answer, Json, JsonResponse, respond
from titan_rl.gateway.bodies import STREAMS, JsonRoute
from titan_rl.gateway.calls import ApiError, Delta, ServedPolicy
from titan_rl.gateway.openai_protocol import ChatCompletionRequest, CompletionRequest
from titan_rl.gateway.sampling import Sampler
from titan_rl.types import ToolCall


def routes(sampler: Sampler) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=JsonRoute)
    listed = {"id": sampler.policy.name, "object": "model", "created": int(time.time()), "owned_by": "titan_rl"}
    listed["max_model_len"] = sampler.policy.max_model_len  # as vLLM's server tells it

    @router.post("/chat/completions", responses=STREAMS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """What the policy says next in a conversation."""
        return await respond(sampler, ChatAnswer(body, sampler.policy), request, body.model, stream=body.stream)

    @router.post("/completions", responses=STREAMS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """How the policy goes on with texts or token ids."""
        return await respond(sampler, TextAnswer(body, sampler.policy), request, body.model, stream=body.stream)

    @router.get("/models")
    async def models() -> Response:
        """The one model there is."""
        return JsonResponse({"object": "list", "data": [listed]})

    @router.get("/models/{model:path}")
    async def model(model: str) -> Response:
        """The one model there is."""
        sampler.policy.check_name(model)
        return JsonResponse(listed)

    return router


def error_object(error: ApiError) -> Json:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "authentication_error" if error.status == 401 else kind
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class OpenAIAnswer(Answer):
    end_of_stream = b"data: [DONE]\n\n"
    error_event = staticmethod(error_object)
    kinds: ClassVar[tuple[str, str, str]]
    """What an answer, a chunk and the call's id are called."""

    def __init__(self, body: ChatCompletionRequest | CompletionRequest, policy: ServedPolicy) -> None:
        self.body = body
        self.call = body.call(f"{self.kinds[2]}-{uuid.uuid4().hex}")
        self._head = {"id": self.call.id, "created": int(time.time()), "model": policy.name}

    @property
    def usage(self) -> Json:
        return {**self.call.usage, "total_tokens": self.call.usage.total()}

    def whole(self, deltas: Sequence[Delta]) -> Json:
        choices = [self.choice(delta) for delta in deltas]
        return {**self._head, "object": self.kinds[0], "choices": choices, "usage": self.usage}

    def chunk(self, choices: Sequence[Json]) -> Json:
        return {**self._head, "object": self.kinds[1], "choices": choices}

    @abstractmethod
    def choice(self, delta: Delta) -> Json:
        """What a delta adds to its choice; the whole choice where it is the only one."""

    def events(self, delta: Delta) -> Iterable[Json]:
        return [self.chunk([self.choice(delta)])]

    def last_events(self) -> Iterable[Json]:
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield {**self.chunk([]), "usage": self.usage}

    def _choice_json(self, delta: Delta, content: Json, logprobs: Json | None) -> Json:
        reason = None
        if (choice := delta.choice) is not None:
            reason = "length" if not choice.stopped else "tool_calls" if choice.message.tool_calls else "stop"
        written = {"index": delta.index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**written, "token_ids": delta.tokens} if self.body.return_token_ids else written


class TextAnswer(OpenAIAnswer):
    kinds = ("text_completion", "text_completion", "cmpl")
    body: CompletionRequest

    def __init__(self, body: CompletionRequest, policy: ServedPolicy) -> None:
        super().__init__(body, policy)
        self._places: defaultdict[int, TokenPlaces] = defaultdict(TokenPlaces)

    def choice(self, delta: Delta) -> Json:
        content: Json = {"text": delta.echo + delta.text}
        if delta.first and self.body.return_token_ids:
            content["prompt_token_ids"] = delta.prompt
        return self._choice_json(delta, content, None if self.body.logprobs is None else self._logprobs(delta))

    def _logprobs(self, delta: Delta) -> Json:
        every, places = [*delta.echoed, *delta.logprobs], self._places[delta.index]
        texts = [token_text(each.token) for each in every]
        tops: list[Json | None] = [  # each token's own first: evaluation harnesses take the first of equal ones
            {text: each.logprob} | {name: value for token, value in each.top if (name := token_text(token)) != text}
            for text, each in zip(texts, every, strict=True)
        ]
        if delta.echoed:
            tops[0] = None
        told = {"tokens": texts, "token_logprobs": [each.logprob for each in every]}
        offsets = [places.add(each.token) for each in delta.echoed]
        if delta.first:
            places.end_prompt()
        offsets += [places.add(each.token) for each in delta.logprobs]
        return {**told, "top_logprobs": tops if self.body.logprobs else None, "text_offset": offsets}


class ChatAnswer(OpenAIAnswer):
    kinds = ("chat.completion", "chat.completion.chunk", "chatcmpl")

    def whole(self, deltas: Sequence[Delta]) -> Json:
        more = {"prompt_token_ids": deltas[0].prompt} if self.body.return_token_ids else {}
        return {**super().whole(deltas), **more}

    def choice(self, delta: Delta) -> Json:
        calls = [_call(each, json.dumps(each.arguments)) for each in delta.calls]
        content = {**self._content(delta), **({"tool_calls": calls} if calls else {}), "refusal": None}
        if calls and not delta.text:
            content["content"] = None
        return self._choice_json(delta, {"message": content}, self._logprobs(delta))

    def events(self, delta: Delta) -> Iterator[Json]:
        content = self._content(delta)
        parts = [content] if content or not delta.calls else []
        for place, call in enumerate(delta.calls, delta.first_call):
            parts.append({"tool_calls": [{"index": place, **_call(call, "")}]})
            parts.append({"tool_calls": [{"index": place, "function": {"arguments": json.dumps(call.arguments)}}]})
        if delta.choice is not None and (parts[0] or delta.tokens):
            parts.append({})
        for place, part in enumerate(parts, 1):
            told = delta if place == len(parts) else replace(delta, choice=None)
            yield self.chunk([self._choice_json(told, {"delta": part}, self._logprobs(told))])
            delta = replace(delta, tokens=[], logprobs=[])

    def _content(self, delta: Delta) -> Json:
        content: Json = {"role": "assistant", "content": ""} if delta.first else {}
        content |= {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        return content | ({"content": delta.text} if delta.text else {})

    def _logprobs(self, delta: Delta) -> Json | None:
        if not self.body.logprobs:
            return None
        tops = [[_logprob(*one) for one in each.top] for each in delta.logprobs]
        sampled = zip(delta.logprobs, tops, strict=True)
        return {"content": [{**_logprob(*each[:2]), "top_logprobs": top} for each, top in sampled]}


def _call(call: ToolCall, arguments: str) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _logprob(token: bytes, logprob: float | None) -> Json:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token)}


def token_text(token: bytes) -> str:
    """Bytes that are no character by themselves are written as `\\xf0`, as OpenAI does."""
    return token.decode(errors="backslashreplace")


class TokenPlaces:
    """Where in its text each token begins, of an echoed prompt and of a completion; one that goes on with a character,
    where that begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def add(self, token: bytes) -> int:
        pending, _ = self._decoder.getstate()
        place = self._length + bool(pending and token and not 0x80 <= token[0] < 0xC0)  # it will never be a character
        self._length += len(self._decoder.decode(token))
        return place

    def end_prompt(self) -> None:
        """What is sampled is a text of its own: it goes on with no character of the prompt."""
        self._length += len(self._decoder.decode(b"", final=True))
