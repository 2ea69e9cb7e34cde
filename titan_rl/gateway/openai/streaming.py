"""Answers that come as they are sampled: server-sent events, each a chunk of OpenAI's API.

- The chunks of a choice, put together, are the choice that a client gets that does not stream, logprobs and token ids
  included. `deltas` decides what may be said when.
- The first event waits for the first token, so that a failure until then has a status of its own.
- A stream that has begun ends with `[DONE]`, whatever happens to it: an error is the event before.
- However the stream ends, its engine work ends too. A choice whose stop text was found is not sampled any further.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from titan_rl.errors import TitanError
from titan_rl.gateway.access.callers import Visit
from titan_rl.gateway.fleet import ClientGone, Fleet, Sampled, unless_gone
from titan_rl.gateway.openai.deltas import TextDeltas
from titan_rl.gateway.openai.errors import ApiError, api_error
from titan_rl.gateway.openai.protocol import ChatCompletionRequest
from titan_rl.gateway.openai.requests import shown_tools, stop_texts
from titan_rl.gateway.openai.responses import LOWEST_LOGPROB, Answer, Choice, read_choice
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece

DONE = b"data: [DONE]\n\n"
Chunk = dict[str, Any]
Read = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Does what tokenizes, off the event loop."""


class ChoiceWriter:
    """The chunks of one choice. Used by the renderer's thread."""

    def __init__(self, answer: Answer, index: int, request: GenerationRequest) -> None:
        body, renderer = answer.body, answer.renderer
        self._answer = answer
        self._index = index
        self._request = request
        content: Callable[[Sequence[int]], str] | None = None
        tools = []
        if isinstance(body, ChatCompletionRequest):
            prompt: list[int] = request.prompt_token_ids.tolist()
            tools = shown_tools(body)

            def content(tokens: Sequence[int]) -> str:
                return renderer.parse(tokens, FinishReason.LENGTH, prompt, tools).content

        self._deltas = TextDeltas(renderer.decode, stops=stop_texts(body), content=content, calls=bool(tools))
        self._pieces: list[Piece] = []
        self._untold: list[Piece] = []  # whose tokens are in no chunk yet
        self._told = 0  # tokens
        self._text_length = 0  # of the tokens that were told, each by itself
        self._began = False

    @property
    def ended(self) -> bool:
        """What was sampled holds a stop text: the answer is complete."""
        return self._deltas.ended

    def so_far(self) -> Completion:
        """What was sampled, as a completion that was cut off."""
        sampled = Piece.join(self._pieces)
        return Completion(
            request_id=self._request.request_id,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            finish_reason=FinishReason.LENGTH,
        )

    def write(self, piece: Piece) -> list[Chunk]:
        """What may be said now that these tokens were sampled."""
        self._pieces.append(piece)
        self._untold.append(piece)
        text = self._deltas.add(piece.token_ids.tolist())
        if self.ended or not (text or self._first_of_a_chat):
            return []
        tokens: list[int] = []
        logprobs: list[float] = []
        for each in self._untold:
            tokens += each.token_ids.tolist()
            logprobs += [max(logprob, LOWEST_LOGPROB) for logprob in each.logprobs.tolist()]
        return [self._chunk(text, {}, tokens, logprobs)]

    def finish(self, completion: Completion) -> tuple[Choice, list[Chunk]]:
        """The whole choice, and what is still to be said of it: the rest, and why it ended."""
        answer = self._answer
        choice = read_choice(self._index, self._request, completion, answer.body, answer.renderer)
        tokens, logprobs = choice.tokens[self._told :], choice.logprobs[self._told :]
        if choice.message is None:
            text = self._deltas.rest(choice.text)
            return choice, [self._chunk(text, {}, tokens, logprobs, finish_reason=choice.finish_reason)]
        text = self._deltas.rest(choice.message.content)
        more = answer.calls_and_reasoning(choice, choice.message)
        chunks = []
        if text or more or tokens or self._first_of_a_chat:
            chunks.append(self._chunk(text, more, tokens, logprobs))
        return choice, [*chunks, answer.chunk(self._index, {"delta": {}}, [], [], finish_reason=choice.finish_reason)]

    @property
    def _first_of_a_chat(self) -> bool:
        return not self._began and isinstance(self._answer.body, ChatCompletionRequest)

    def _chunk(
        self,
        text: str,
        more: dict[str, Any],
        tokens: list[int],
        logprobs: list[float],
        finish_reason: str | None = None,
    ) -> Chunk:
        content: dict[str, Any]
        if isinstance(self._answer.body, ChatCompletionRequest):
            begin = {} if self._began else {"role": "assistant", "content": ""}
            content = {"delta": {**begin, **({"content": text} if text else {}), **more}}
        else:
            content = {"text": text}
            if not self._began and self._answer.body.return_token_ids:
                content["prompt_token_ids"] = self._request.prompt_token_ids.tolist()
        chunk = self._answer.chunk(
            self._index, content, tokens, logprobs, text_offset=self._text_length, finish_reason=finish_reason
        )
        self._began = True
        self._told += len(tokens)
        self._untold.clear()
        if self._answer.body.logprobs is not None:
            self._text_length += sum(len(self._answer.renderer.decode([token])) for token in tokens)
        return chunk


async def events(
    answer: Answer,
    requests: Sequence[GenerationRequest],
    fleet: Fleet,
    visit: Visit,
    *,
    read: Read,
    count: Callable[[dict[str, int]], None],
) -> AsyncGenerator[Chunk, None]:
    """The chunks of one call, in the order in which tokens come.

    Args:
        count: is told the usage of an answer that was complete.

    Raises:
        TitanError: an engine failed, or the visit is over.
        ApiError: the answer is not what was streamed of it.
    """
    writers = [ChoiceWriter(answer, index, request) for index, request in enumerate(requests)]
    choices: list[Choice] = []
    async with aclosing(Sampled(fleet, requests)) as sampled:
        while True:
            try:
                each = await sampled.next()
            except TitanError as error:
                visit.failed(error)
                raise
            if each is None:
                break
            index, completion = each
            writer = writers[index]
            if isinstance(completion, Piece):
                for chunk in await read(functools.partial(writer.write, completion)):
                    yield chunk
                if not writer.ended:
                    continue
                await sampled.end(index)
                completion = writer.so_far()
            choice, chunks = await read(functools.partial(writer.finish, completion))
            visit.answered(choice, completion)
            choices.append(choice)
            for chunk in chunks:
                yield chunk
    count(answer.usage(choices))
    if answer.body.stream_options is not None and answer.body.stream_options.include_usage:
        yield answer.usage_chunk(choices)


class EventStream(Response):
    """Server-sent events: each chunk as one, then `[DONE]`; an error that comes after the first one is an event too."""

    media_type = "text/event-stream"

    def __init__(self, first: Chunk, rest: AsyncGenerator[Chunk, None], visit: Visit) -> None:
        """
        Args:
            visit: whose call it is.
        """
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._visit = visit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await unless_gone(self._send(send), receive, self._visit.over)
            except ClientGone:
                return
            except TitanError as error:
                await send({"type": "http.response.body", "body": _event(api_error(error).body()) + DONE})

    async def _send(self, send: Send) -> None:
        last = DONE
        await send({"type": "http.response.body", "body": _event(self._first), "more_body": True})
        try:
            async for chunk in self._rest:
                await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})
        except TitanError as error:
            last = _event(api_error(error).body()) + DONE
        except ApiError as error:
            last = _event(error.body()) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
