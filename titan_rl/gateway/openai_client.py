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
            ConfigError: the server does not answer, or lists no model.
        """
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._pauses = pauses
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="chat")
        self.model = model or self._first_model()

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
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": request.seed & 0x7FFFFFFF,
        }
        if tools:
            body["tools"] = [{"type": "function", "function": tool._asdict()} for tool in tools]
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._threads, self._ask, "/chat/completions", body)
        try:
            choice = answer["choices"][0]
            said = _read(choice["message"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            what = one_line(json.dumps(answer), LONGEST_REFUSAL)
            raise GeneratorFailed(f"{self._url} answered no chat completion: {what}") from error
        return said, FinishReason.LENGTH if choice.get("finish_reason") == "length" else FinishReason.STOP

    def _first_model(self) -> str:
        try:
            return str(self._ask("/models")["data"][0]["id"])
        except GeneratorFailed as error:
            raise ConfigError(str(error)) from error
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"{self._url} lists no model: name one, --model NAME") from error

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
                    asked = f"{body['max_tokens']} tokens were asked for (rollout.sampling.max_new_tokens)"
                    raise RequestError(f"{refusal}; {asked}") from error
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
