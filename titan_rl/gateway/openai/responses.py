"""From what the engines sampled to what the client reads: the bodies and chunks of OpenAI's API.

- `token_ids` and logprobs speak about the same tokens: all that were sampled, the stop token included, up to the one
  that completed a stop text.
- The text is that of these tokens without the stop token, cut before a stop text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.chat.renderer import Renderer
from titan_rl.gateway.openai.protocol import ChatCompletionRequest, CompletionRequest
from titan_rl.gateway.openai.requests import shown_tools, stop_texts
from titan_rl.types import Completion, FinishReason, GenerationRequest, Message

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; the value that OpenAI uses for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion, read."""

    index: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    stopped: bool
    """By a stop token or a stop text; else by its length."""
    message: Message | None = None
    """What was said, of a chat; calls that could not be read are in its text."""

    @property
    def finish_reason(self) -> str:
        if self.message is not None and self.message.tool_calls:
            return "tool_calls"
        return "stop" if self.stopped else "length"


def read_choice(
    index: int,
    request: GenerationRequest,
    completion: Completion,
    body: CompletionRequest | ChatCompletionRequest,
    renderer: Renderer,
) -> Choice:
    """Find the end of a completion, and in a chat what was said."""
    tokens: list[int] = completion.token_ids.tolist()
    stopped = completion.finish_reason is FinishReason.STOP
    said = tokens[:-1] if stopped else tokens
    text = renderer.decode(said)
    stops = stop_texts(body)
    cut = _first(text, stops)
    if cut < len(text):
        kept = _tokens_until(said, stops, renderer)
        tokens, said, text, stopped = tokens[:kept], said[:kept], text[:cut], True
    message = None
    prompt: list[int] = request.prompt_token_ids.tolist()
    if isinstance(body, ChatCompletionRequest):
        # Without its stop token a turn is read as one that was cut, which is what it is after a stop text.
        ended = len(tokens) > len(said) and tokens[-1] in renderer.stop_token_ids
        reason = FinishReason.STOP if ended else FinishReason.LENGTH
        parsed = renderer.parse(tokens if ended else said, reason, prompt, shown_tools(body))
        content = parsed.content + "".join(call.raw for call in parsed.tool_calls)
        message = parsed._replace(
            content=content[: _first(content, stops)],
            tool_calls=tuple(call for call in parsed.tool_calls if not call.problem),
        )
    return Choice(
        index=index,
        prompt=prompt,
        tokens=tokens,
        logprobs=[max(each, LOWEST_LOGPROB) for each in completion.logprobs[: len(tokens)].tolist()],
        text=text,
        stopped=stopped,
        message=message,
    )


def _first(text: str, stops: Sequence[str]) -> int:
    """Where the first stop text begins; the text's length where there is none."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))


def _tokens_until(tokens: Sequence[int], stops: Sequence[str], renderer: Renderer) -> int:
    """The least number of tokens whose text holds a stop text."""
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        text = renderer.decode(tokens[:middle])
        low, high = (low, middle) if _first(text, stops) < len(text) else (middle + 1, high)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The shape of one call's answer."""

    call_id: str
    created: int
    """Unix seconds."""
    model: str
    body: CompletionRequest | ChatCompletionRequest
    renderer: Renderer

    @property
    def _chat(self) -> bool:
        return isinstance(self.body, ChatCompletionRequest)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Without streaming: everything at once."""
        answer = self._head("chat.completion" if self._chat else "text_completion")
        answer["choices"] = [self._choice(choice) for choice in choices]
        answer["usage"] = self.usage(choices)
        if self._chat and self.body.return_token_ids:
            answer["prompt_token_ids"] = choices[0].prompt
        return answer

    def chunk(
        self,
        index: int,
        content: dict[str, Any],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        *,
        text_offset: int = 0,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        """With streaming: what one choice adds.

        Args:
            content: `delta` of a chat, else `text`.
            tokens, logprobs: those that are new.
            text_offset: length of the text of the tokens before them.
            finish_reason: in the last chunk of a choice.
        """
        written = {"index": index, **content, "logprobs": self._logprobs(tokens, logprobs, text_offset)}
        written["finish_reason"] = finish_reason
        if self.body.return_token_ids:
            written["token_ids"] = tokens
        return {**self._chunk_head(), "choices": [written]}

    def calls_and_reasoning(self, choice: Choice, said: Message) -> dict[str, Any]:
        """Of the message of a choice, for the delta that ends it."""
        message = self._message(choice, said)
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if said.reasoning:
            more["reasoning_content"] = said.reasoning
        return more

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._chunk_head(), "choices": [], "usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Tokens of every prompt once, and of every choice."""
        count = self.body.n or 1
        prompt = sum(len(choice.prompt) for choice in choices if choice.index % count == 0)
        sampled = sum(len(choice.tokens) for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.call_id, "object": kind, "created": self.created, "model": self.model}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self._chat else "text_completion")

    def _choice(self, choice: Choice) -> dict[str, Any]:
        written: dict[str, Any] = {"index": choice.index}
        if choice.message is None:
            written["text"] = choice.text
        else:
            written["message"] = self._message(choice, choice.message)
        written["logprobs"] = self._logprobs(choice.tokens, choice.logprobs)
        written["finish_reason"] = choice.finish_reason
        if self.body.return_token_ids:
            written["token_ids"] = choice.tokens
            if choice.message is None:
                written["prompt_token_ids"] = choice.prompt
        return written

    def _message(self, choice: Choice, said: Message) -> dict[str, Any]:
        written: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.tool_calls:
            written["content"] = said.content or None
            written["tool_calls"] = [
                {
                    "id": call.id or f"call-{self.call_id}-{choice.index}-{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for number, call in enumerate(said.tool_calls)
            ]
        if said.reasoning:
            written["reasoning_content"] = said.reasoning
        return written

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], text_offset: int = 0
    ) -> dict[str, Any] | None:
        if not self._chat:
            return None if self.body.logprobs is None else self._text_logprobs(tokens, logprobs, text_offset)
        return {"content": self._chat_logprobs(tokens, logprobs)} if self.body.logprobs else None

    def _chat_logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
        entries = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            text = self.renderer.decode([token])
            entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return entries

    def _text_logprobs(self, tokens: Sequence[int], logprobs: Sequence[float], offset: int) -> dict[str, Any]:
        texts = [self.renderer.decode([token]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}
