"""The other end of the gateway: any server with OpenAI's chat API as a policy, asked by OpenAI's client.

A server that is busy or restarts is asked again a few times. What it refuses is an error that names the server and what
it said.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from titan_rl.chat.chat_renderer import as_dicts
from titan_rl.errors import ConfigError, GeneratorFailed, RequestError
from titan_rl.importing import import_package
from titan_rl.one_line import one_line
from titan_rl.types import FinishReason, GenerationRequest, Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    import openai

AT_ONCE = 64
ANSWER_SECONDS = 600.0
RETRIES = 4
"""Of a call that a busy server did not answer."""
NO_LIST = (404, 405)
"""Statuses of a server that does not list its models."""
LONGEST_REFUSAL = 300
"""Characters of what a server says that are quoted."""


class ChatServer:
    def __init__(self, url: str, *, model: str = "", api_key: str = "") -> None:
        """`url`: whatever stands before `/chat/completions`. Without a `model`, the first that the server lists. Raises
        AbsentError: OpenAI's client is not installed; ConfigError: the server does not answer, or lists no model."""
        self._openai = openai = import_package("openai", for_what="a server as a policy", install="titan-rl[agents]")
        self._url = url.rstrip("/")
        key = api_key or "none"  # the client takes no empty one
        asking = openai.AsyncOpenAI(base_url=self._url, api_key=key, timeout=ANSWER_SECONDS, max_retries=RETRIES)
        self._create: Any = asking.chat.completions.with_raw_response.create
        self._free = asyncio.Semaphore(AT_ONCE)
        with openai.OpenAI(base_url=self._url, api_key=key, timeout=ANSWER_SECONDS, max_retries=0) as client:
            self.model, self._max_model_len = self._find_model(client, model)

    async def next_message(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], request: GenerationRequest
    ) -> tuple[Message, FinishReason]:
        """Raises RequestError: the server refuses this call; GeneratorFailed: it cannot be reached, or answers no chat
        completion."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "messages": _to_openai(messages),
            "temperature": sampling.temperature,
            "seed": request.seed & 0x7FFFFFFF,
        }
        if tools:
            body["tools"] = [{"type": "function", "function": tool._asdict()} for tool in tools]
        async with self._free:
            answer = await self._complete(body, sampling.max_new_tokens)
        try:
            choice = answer["choices"][0]
            message = _from_openai(choice["message"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            what = one_line(json.dumps(answer), LONGEST_REFUSAL)
            raise GeneratorFailed(f"{self._url} answered no chat completion: {what}") from error
        return message, FinishReason.LENGTH if choice.get("finish_reason") == "length" else FinishReason.STOP

    def _find_model(self, client: openai.OpenAI, model: str) -> tuple[str, int]:
        """The model's name, and its length in tokens if the server tells it; else 0."""
        try:
            listed = client.models.with_raw_response.list().http_response.json()["data"]
            found = next(each for each in listed if model in ("", each["id"]))
            return str(found["id"]), int(found.get("max_model_len") or 0)
        except self._openai.APIError as error:
            if not model or getattr(error, "status_code", 0) not in NO_LIST:
                raise ConfigError(self._refusal(error)) from error
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            if not model:
                raise ConfigError(f"{self._url} lists no model: name one, --model NAME") from error
        return model, 0

    async def _complete(self, body: dict[str, Any], most: int) -> Any:
        """Ask for at most `most` tokens, or for all that the prompt leaves of the model's length where that is less.
        Only the server knows how many tokens a prompt has."""
        length = self._max_model_len
        if not length or most < length:
            try:
                return await self._ask({**body, "max_tokens": most})
            except RequestError:
                if not length:
                    raise
        return await self._ask(body)  # a server that tells its length takes what is left by default

    async def _ask(self, body: dict[str, Any]) -> Any:
        try:
            return (await self._create(**body)).http_response.json()
        except self._openai.APIStatusError as error:
            refusal = self._refusal(error)
            if error.status_code not in (400, 413, 422):
                raise GeneratorFailed(refusal) from error
            if most := body.get("max_tokens"):
                refusal += f"; {most} tokens were asked for (rollout.sampling.max_new_tokens)"
            raise RequestError(refusal) from error
        except (self._openai.APIError, ValueError) as error:
            raise GeneratorFailed(self._refusal(error)) from error

    def _refusal(self, error: Exception) -> str:
        if isinstance(error, self._openai.APIStatusError):
            body = error.body if isinstance(error.body, dict) else {}
            text = str(body.get("message") or error.response.text or error.response.reason_phrase)
            return f"{self._url} refuses ({error.status_code}): {one_line(text, LONGEST_REFUSAL)}"
        return f"{self._url} cannot be asked: {one_line(str(error.__cause__ or error), LONGEST_REFUSAL)}"


def _to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the API takes them. Each call has an id there, and each answer names its call's."""
    written = as_dicts(messages)
    unanswered: list[str] = []
    for place, body in enumerate(written):
        body.pop("reasoning_content", None)
        if calls := body.get("tool_calls", ()):
            unanswered = [call.setdefault("id", f"call-{place}-{number}") for number, call in enumerate(calls)]
        for call in calls:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if body["role"] == "tool":
            expected = unanswered.pop(0) if unanswered else ""
            body.setdefault("tool_call_id", expected)
    return written


def _from_openai(message: dict[str, Any]) -> Message:
    calls = tuple(map(_tool_call, message.get("tool_calls") or ()))
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    content = message.get("content") or ""
    if not isinstance(content, str):  # some servers answer in parts
        content = "".join(part.get("text") or "" for part in content)
    return Message("assistant", content, calls, reasoning=reasoning)


def _tool_call(call: dict[str, Any]) -> ToolCall:
    name, text = call["function"]["name"], call["function"].get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"the arguments of {name} must be a JSON object: {text}", f"{name}({text})")
    return ToolCall(name, arguments, id=call.get("id") or "")
