"""Whose call it is. A door lets a call in by its key; the visit that it gets decides what the engines are asked for it.

There are two doors: one key for everybody, who decide how they sample (here), and a key per rollout of a run, whose
calls become that rollout (`sessions`). The app treats both alike.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import GatewayClosing, TitanError
from titan_rl.gateway.openai.protocol import ChatCompletionRequest, CompletionRequest
from titan_rl.gateway.openai.requests import build_requests
from titan_rl.gateway.openai.responses import Choice
from titan_rl.rollout.session import Prompt
from titan_rl.types import Completion, GenerationRequest, Message, ToolSpec

CLOSED = "the gateway is being closed; the call was aborted"


class Visit(AbstractContextManager[None], Protocol):
    """One HTTP call, for as long as it is open."""

    @property
    def over(self) -> asyncio.Future[TitanError]:
        """Done when the call must end, whatever it waits for, with what its client is told."""

    def prompt_of_chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
        """Called by the renderer's thread. Raises TaskError where the renderer cannot write the messages."""

    def prompt_of_tokens(self, token_ids: Sequence[int]) -> Prompt:
        """Called by the renderer's thread."""

    def requests(
        self, call_id: str, prompts: Sequence[Prompt], body: CompletionRequest | ChatCompletionRequest
    ) -> list[GenerationRequest]:
        """One request per choice: the choices of the first prompt, then those of the second, …

        Raises:
            RequestError: no engine can serve it, or the caller may not ask for so much; the sentence says why.
        """

    def unheard(self, body: CompletionRequest | ChatCompletionRequest) -> Sequence[str]:
        """Fields of the body that are set and not used."""

    def answered(self, choice: Choice, completion: Completion) -> None:
        """A choice is about to be handed out. Raises SessionOver when nobody may have it any more."""

    def failed(self, error: Exception) -> None:
        """The engines did not answer."""


class Door(Protocol):
    def admit(self, authorization: str) -> Visit | None:
        """The visit of a call with this header; None: its key is missing or wrong."""

    def close_all(self) -> None:
        """The gateway closes: every visit is over."""


class SharedKey:
    """The door of a server: everybody has the same key, or needs none."""

    def __init__(self, api_key: str, renderer: Renderer, *, max_model_len: int) -> None:
        """Must be made within a loop.

        Args:
            api_key: empty: none is asked for.
            max_model_len: longest prompt and completion together, in tokens.
        """
        self._authorization = f"Bearer {api_key}".encode() if api_key else b""
        self._guest = Guest(renderer, max_model_len=max_model_len)

    def admit(self, authorization: str) -> Guest | None:
        right = not self._authorization or hmac.compare_digest(authorization.encode("latin-1"), self._authorization)
        return self._guest if right else None

    def close_all(self) -> None:
        if not self._guest.over.done():
            self._guest.over.set_result(GatewayClosing(CLOSED))


class Guest:
    """A call of nobody in particular; nothing is remembered of it."""

    def __init__(self, renderer: Renderer, *, max_model_len: int) -> None:
        self.over: asyncio.Future[TitanError] = asyncio.get_running_loop().create_future()
        self._renderer = renderer
        self._max_model_len = max_model_len

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def prompt_of_chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
        return self.prompt_of_tokens(self._renderer.render(messages, tools))

    def prompt_of_tokens(self, token_ids: Sequence[int]) -> Prompt:
        return Prompt(token_ids=np.asarray(token_ids, dtype=np.int32))

    def requests(
        self, call_id: str, prompts: Sequence[Prompt], body: CompletionRequest | ChatCompletionRequest
    ) -> list[GenerationRequest]:
        ids = [prompt.token_ids for prompt in prompts]
        return build_requests(call_id, ids, body, self._renderer, max_model_len=self._max_model_len)

    def unheard(self, body: CompletionRequest | ChatCompletionRequest) -> Sequence[str]:
        return ()

    def answered(self, choice: Choice, completion: Completion) -> None:
        return None

    def failed(self, error: Exception) -> None:
        return None
