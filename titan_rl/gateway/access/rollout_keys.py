"""The keys of a run's rollouts, and what comes of the calls that are made with each.

- A key is good from `open` to `close` of its session; what is asked with it belongs to that rollout and to no other.
- A session is closed at once: its record is what was answered until then, calls that are open are aborted in the
  engines, and what they would have been answered is in no record.
- Sampling options of a program are taken and not used (`UNHEARD`): see `rollout.session`.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import GatewayClosing, RequestError, SessionOver, TaskError, TitanError
from titan_rl.gateway.access.callers import CLOSED
from titan_rl.gateway.openai.protocol import ChatCompletionRequest, CompletionRequest
from titan_rl.gateway.openai.requests import client_sampling, stop_tokens
from titan_rl.gateway.openai.responses import Choice
from titan_rl.rollout.session import Prompt, Session, SessionRecord, SessionRequest
from titan_rl.types import Completion, Endpoint, FinishReason, GenerationRequest, Message, ToolSpec

UNHEARD = (
    "temperature",
    "top_p",
    "top_k",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
"""Options that would change how tokens are drawn, which is the run's business."""
SCHEME = "Bearer "


class SessionKeys:
    """All open sessions of a gateway; a `Sessions` for rollout workers and the door of the app. Belongs to one loop."""

    def __init__(self, renderer: Renderer, *, base_url: str, model: str, run_seed: int, max_model_len: int) -> None:
        """
        Args:
            base_url: where programs reach the gateway, with `/v1`.
            model: the name that they must ask for.
            run_seed: the run's seed.
            max_model_len: longest prompt and completion together, in tokens.
        """
        self._renderer = renderer
        self._base_url = base_url
        self._model = model
        self._run_seed = run_seed
        self._max_model_len = max_model_len
        self._by_id: dict[str, _Open] = {}
        self._by_key: dict[bytes, _Open] = {}

    async def open(self, request: SessionRequest) -> Endpoint:
        """See `Sessions`. Raises RequestError where a session of that id is open."""
        if request.session_id in self._by_id:
            raise RequestError(f"session {request.session_id} is open already")
        session = Session(request, self._renderer, run_seed=self._run_seed, max_model_len=self._max_model_len)
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._by_id[request.session_id] = self._by_key[_digest(key)] = _Open(session, _digest(key))
        return Endpoint(base_url=self._base_url, api_key=key, model=self._model)

    async def idle(self, session_id: str, seconds: float) -> None:
        """See `Sessions`; returns too when the session is closed. Raises SessionOver where there is none."""
        await self._found(session_id).quiet.lasts(seconds)

    async def close(self, session_id: str) -> SessionRecord:
        """See `Sessions`. Raises SessionOver where there is none."""
        found = self._found(session_id)
        del self._by_id[session_id], self._by_key[found.key_digest]
        return found.close(SessionOver("the rollout has ended; the call was aborted"))

    def close_all(self) -> None:
        for found in self._by_id.values():
            found.close(GatewayClosing(CLOSED))
        self._by_id.clear()
        self._by_key.clear()

    def admit(self, authorization: str) -> SessionVisit | None:
        key = authorization.removeprefix(SCHEME)
        if key == authorization:
            return None
        # Looked up by digest: how long that takes tells nothing about the keys that there are.
        found = self._by_key.get(_digest(key))
        return None if found is None else SessionVisit(found, self._renderer, max_model_len=self._max_model_len)

    def _found(self, session_id: str) -> _Open:
        if session_id not in self._by_id:
            raise SessionOver(f"there is no open session {session_id}")
        return self._by_id[session_id]


class SessionVisit:
    """A call of a rollout's program."""

    def __init__(self, found: _Open, renderer: Renderer, *, max_model_len: int) -> None:
        self._open = found
        self._session = found.session
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._asked: list[str] = []

    @property
    def over(self) -> asyncio.Future[TitanError]:
        return self._open.over

    def __enter__(self) -> None:
        self._open.quiet.interrupt()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # a bug of ours: nothing else gets out of the app
            self.failed(error)
        self._session.dropped(self._asked)
        self._open.quiet.resume()

    def prompt_of_chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
        return self._session.prompt_of_chat(messages, tools)

    def prompt_of_tokens(self, token_ids: Sequence[int]) -> Prompt:
        return self._session.prompt_of_tokens(token_ids)

    def requests(
        self, call_id: str, prompts: Sequence[Prompt], body: CompletionRequest | ChatCompletionRequest
    ) -> list[GenerationRequest]:
        stops = stop_tokens(body, self._renderer)
        wanted = [client_sampling(body, stops, room=self._max_model_len - len(prompt.token_ids)) for prompt in prompts]
        requests = self._session.ask(call_id, list(zip(prompts, wanted, strict=True)), choices=body.n or 1)
        self._asked += [request.request_id for request in requests]
        return requests

    def unheard(self, body: CompletionRequest | ChatCompletionRequest) -> Sequence[str]:
        return [name for name in UNHEARD if getattr(body, name) is not None]

    def answered(self, choice: Choice, completion: Completion) -> None:
        kept = len(choice.tokens)
        if kept < len(completion.token_ids):
            completion = replace(
                completion,
                token_ids=completion.token_ids[:kept],
                logprobs=completion.logprobs[:kept],
                versions=completion.versions[:kept],
                finish_reason=FinishReason.LENGTH,  # its last token is no stop token
            )
        message = choice.message or Message("assistant", choice.text)
        self._session.answered(completion, message, stopped=choice.stopped)

    def failed(self, error: Exception) -> None:
        if not isinstance(error, (RequestError, TaskError)):  # those are the program's own
            self._session.failed(f"{type(error).__name__}: {error}")


class _Open:
    """An open session."""

    def __init__(self, session: Session, key_digest: bytes) -> None:
        self.session = session
        self.key_digest = key_digest
        self.over: asyncio.Future[TitanError] = asyncio.get_running_loop().create_future()
        self.quiet = Quiet()

    def close(self, reason: TitanError) -> SessionRecord:
        """
        Args:
            reason: what clients of open calls are told.
        """
        record = self.session.close()
        self.over.set_result(reason)
        self.quiet.end()
        return record


class Quiet:
    """How long nothing was going on. Belongs to one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._going_on = 0
        self._since = self._loop.time()
        self._waiting: dict[asyncio.Future[None], float] = {}
        self._timers: list[asyncio.TimerHandle] = []

    def interrupt(self) -> None:
        """Something begins."""
        self._going_on += 1
        self._disarm()

    def resume(self) -> None:
        """It has ended."""
        self._going_on -= 1
        self._since = self._loop.time()
        self._arm()

    def end(self) -> None:
        """Nobody has to wait any longer."""
        for waiting in self._waiting:
            _finish(waiting)

    async def lasts(self, seconds: float) -> None:
        """Returns once nothing has been going on for so long, or at the end."""
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._waiting[waiting] = seconds
        self._arm()
        try:
            await waiting
        finally:
            del self._waiting[waiting]

    def _arm(self) -> None:
        self._disarm()
        if not self._going_on:
            self._timers = [
                self._loop.call_at(self._since + seconds, _finish, waiting)
                for waiting, seconds in self._waiting.items()
            ]

    def _disarm(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []


def _finish(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
