"""Answers over HTTP, in any dialect: a body, or a stream of events.

- The events of an answer, put together, are the answer that a client gets that does not stream. Only text behind a call
  stands before it there.
- The first event waits for the first token, so a failure until then has a status of its own.
- A stream that has begun ends with its error as an event.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from titan_rl.errors import TitanError
from titan_rl.gateway.callers import CALLER, Caller
from titan_rl.gateway.calls import ApiError, CompletionCall, Delta, api_error
from titan_rl.gateway.sampling import Sampler

T = TypeVar("T")
Json = dict[str, Any]

LONG_ECHO = 256
"""Tokens; the logprobs of fewer are written at once."""


class Answer(ABC):
    """One answer, as a client of its dialect reads it."""

    call: CompletionCall
    end_of_stream: ClassVar[bytes] = b""

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The body; every delta has its choice."""

    @abstractmethod
    def events(self, delta: Delta) -> Iterable[Json]:
        """What a delta tells a client that streams."""

    def last_events(self) -> Iterable[Json]:
        """What follows the last delta."""
        return ()

    @abstractmethod
    def error_event(self, error: ApiError) -> Json:
        """What ends a stream that failed."""


class PartedAnswer(Answer):
    """Of one choice, as a row of parts: thinking, text, calls. Each is whole before the next one begins."""

    shows_thinking = True
    open = ""
    """What the last part is, while it grows."""

    def steps(self, delta: Delta) -> Iterator[tuple[str, Any]]:
        """What it does to the parts: ("begin", "thinking" or "text"), ("write", more), ("end", which), ("call", it)."""
        parts = [("thinking", delta.reasoning)] if self.shows_thinking and delta.reasoning else []
        said = delta.choice.message if delta.choice is not None else None
        empty = said is not None and not (said.content or said.tool_calls)  # then clients expect an empty text
        parts += [("text", delta.text)] if delta.text or empty else []
        for kind, text in [*parts, ("", "")] if delta.calls or delta.choice is not None else parts:
            if self.open and self.open != kind:
                yield "end", self.open
            begins, self.open = self.open != kind, kind
            if kind and begins:
                yield "begin", kind
            if kind:
                yield "write", text
        for call in delta.calls:
            yield "call", call


async def respond(sampler: Sampler, answer: Answer, request: Request, model: str, *, stream: bool | None) -> Response:
    sampler.policy.check_name(model)
    caller = request.scope[CALLER]
    if stream:
        return EventStream(_events(sampler, answer, caller), headers={"Cache-Control": "no-cache"})
    return await _written(lambda deltas: JsonResponse(answer.whole(deltas)), await sampler.whole(answer.call, caller))


async def _events(sampler: Sampler, answer: Answer, caller: Caller) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with aclosing(sampler.stream(answer.call, caller)) as deltas:
            async for delta in deltas:
                yield await _written(lambda deltas: b"".join(map(_event, answer.events(deltas[0]))), [delta])
                begun = True
        yield b"".join(map(_event, answer.last_events()))
    except (ApiError, TitanError) as error:
        if not begun:
            raise
        yield _event(answer.error_event(api_error(error)))
    yield answer.end_of_stream


async def _written(write: Callable[[list[Delta]], T], deltas: list[Delta]) -> T:
    """Prompts come back at once; the logprobs of a long one take up to a second, in which others must be answered."""
    long = sum(len(delta.echoed) for delta in deltas) > LONG_ECHO
    return await asyncio.to_thread(write, deltas) if long else write(deltas)


def _event(content: Json) -> bytes:
    """Dialects whose events have a type name them by it."""
    name = b"event: " + content["type"].encode() + b"\n" if "type" in content else b""
    return name + b"data: " + to_json(content) + b"\n\n"


class JsonResponse(JSONResponse):
    """JSON in ASCII: text of a client that comes back in an error may hold what UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, its iterator is closed, and with it the engine work behind it."""

    media_type = "text/event-stream"
    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator) as events:
            body = await anext(events)  # what fails before it is answered with a status of its own
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def to_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
