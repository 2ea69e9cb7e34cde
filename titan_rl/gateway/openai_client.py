"""The other end of the gateway: any server with OpenAI's chat API as a policy.

Standard library only. A server that is busy or restarts is asked again a few times; what it refuses is an error that
names the server and what it said.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from titan_rl.errors import ConfigError, GeneratorFailed, RequestError
from titan_rl.one_line import one_line
from titan_rl.types import FinishReason, GenerationRequest, Message, ToolCall, ToolSpec

AT_ONCE = 64
"""Calls that are open at a time."""
ANSWER_SECONDS = 600.0
PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds before a busy server is asked again."""
NO_LIST = (404, 405)
"""Statuses of a server that does not list its models."""
BUSY = (408, 425, 429, 500, 502, 503, 504)
LONGEST_REFUSAL = 300
"""Characters of what a server says that are told."""


class ChatServer:
    """A policy behind `/chat/completions`."""

    def __init__(self, url: str, *, model: str = "", api_key: str = "", pauses: Sequence[float] = PAUSES) -> None:
        """
        Args:
            url: with `/v1`, or whatever stands before `/chat/completions`.
            model: empty: the first that the server lists.

        Raises:
            ConfigError: the server does not answer, or lists no model and none is named.
        """
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._pauses = pauses
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="chat")
        self.model, self._max_model_len = self._found(model)

    async def say(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], request: GenerationRequest
    ) -> tuple[Message, FinishReason]:
        """The policy's next message.

        Raises:
            RequestError: the server refuses this call.
            GeneratorFailed: it cannot be reached, or answers no chat completion.
        """
        sampling = request.sampling
        body = {
            "model": self.model,
            "messages": _written(messages),
            "temperature": sampling.temperature,
            "seed": request.seed & 0x7FFFFFFF,
        }
        if tools:
            body["tools"] = [{"type": "function", "function": tool._asdict()} for tool in tools]
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._threads, self._complete, body, sampling.max_new_tokens)
        try:
            choice = answer["choices"][0]
            said = _read(choice["message"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            what = one_line(json.dumps(answer), LONGEST_REFUSAL)
            raise GeneratorFailed(f"{self._url} answered no chat completion: {what}") from error
        return said, FinishReason.LENGTH if choice.get("finish_reason") == "length" else FinishReason.STOP

    def _found(self, model: str) -> tuple[str, int]:
        """The model's name and its length in tokens, as far as the server tells it; 0: it does not."""
        try:
            listed = self._ask("/models")["data"]
            found = next(each for each in listed if model in ("", each["id"]))
            return str(found["id"]), int(found.get("max_model_len") or 0)
        except GeneratorFailed as error:
            if not model or getattr(error.__cause__, "code", 0) not in NO_LIST:
                raise ConfigError(str(error)) from error
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            if not model:
                raise ConfigError(f"{self._url} lists no model: name one, --model NAME") from error
        return model, 0

    def _complete(self, body: dict[str, Any], most: int) -> Any:
        """Ask for at most `most` tokens, or for all that the prompt leaves of the model's length where that is less.
        Only the server knows how many tokens a prompt has."""
        length = self._max_model_len
        if not length or most < length:
            try:
                return self._ask("/chat/completions", {**body, "max_tokens": most})
            except RequestError:
                if not length:
                    raise
        return self._ask("/chat/completions", body)  # a server that tells its length takes what is left by default

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        call = urllib.request.Request(self._url + path, data=data, headers=headers)
        for pause in (*self._pauses, None):
            try:
                with urllib.request.urlopen(call, timeout=ANSWER_SECONDS) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                refusal = f"{self._url} refuses ({error.code}): {_said_in(error)}"
                if error.code not in BUSY or pause is None:
                    if body is None or error.code not in (400, 413, 422):
                        raise GeneratorFailed(refusal) from error
                    if most := body.get("max_tokens"):
                        refusal += f"; {most} tokens were asked for (rollout.sampling.max_new_tokens)"
                    raise RequestError(refusal) from error
            except (OSError, ValueError, http.client.HTTPException) as error:  # a URLError is an OSError
                if pause is None or body is None:
                    reason = getattr(error, "reason", error)
                    raise GeneratorFailed(
                        f"{self._url} cannot be asked: {one_line(str(reason), LONGEST_REFUSAL)}"
                    ) from error
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def _said_in(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        pass
    return one_line(str(text) or str(error.reason), LONGEST_REFUSAL)


def _written(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the API takes them. Each call has an id there, and each answer names its call's."""
    written: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for place, message in enumerate(messages):
        body: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name:
            body["name"] = message.name
        calls = [call for call in message.tool_calls if not call.problem]
        if calls:
            unanswered = [call.id or f"call-{place}-{number}" for number, call in enumerate(calls)]
            body["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for name, call in zip(unanswered, calls, strict=True)
            ]
        if message.role == "assistant":  # a call that could not be read is written back as the policy wrote it
            body["content"] += "".join(call.raw for call in message.tool_calls)
        if message.role == "tool":
            expected = unanswered.pop(0) if unanswered else ""
            body["tool_call_id"] = message.tool_call_id or expected
        written.append(body)
    return written


def _read(message: dict[str, Any]) -> Message:
    calls = tuple(map(_called, message.get("tool_calls") or ()))
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    content = message.get("content") or ""
    if not isinstance(content, str):  # some servers answer in parts
        content = "".join(part.get("text") or "" for part in content)
    return Message("assistant", content, calls, reasoning=reasoning)


def _called(call: dict[str, Any]) -> ToolCall:
    name, text = call["function"]["name"], call["function"].get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"the arguments of {name} must be a JSON object: {text}", f"{name}({text})")
    return ToolCall(name, arguments, id=call.get("id") or "")
