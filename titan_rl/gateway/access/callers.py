"""Whose call it is. An API key finds its caller, who decides what the engines are asked for a call.

There are two kinds: one key for everybody, who decide how they sample (here), and a key per rollout of a run, whose
calls become that rollout (`rollout_keys`). The app treats both alike.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from titan_rl.errors import GatewayClosing, TitanError
from titan_rl.gateway.calls import Call, Chat, Choice, ServedPolicy
from titan_rl.generation.engine import validate_request
from titan_rl.rollout.session import Prompt
from titan_rl.seeding import derive_seed
from titan_rl.types import GenerationRequest

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


class Caller:
    """Whoever has the key of a server: samples as it likes, and nothing is remembered of it."""

    def __init__(self, policy: ServedPolicy) -> None:
        """Must be made within a loop."""
        self._policy = policy
        self.ended: asyncio.Future[TitanError] = asyncio.get_running_loop().create_future()
        """Done when all open calls must end, with what their clients are told."""

    def end(self, reason: TitanError) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    @contextmanager
    def call_open(self) -> Iterator[None]:
        """For as long as a call is open."""
        yield

    def prompt(self, asked: Chat | str | list[int]) -> Prompt:
        """Runs in the render thread. Raises TaskError where the renderer cannot write it."""
        renderer = self._policy.renderer
        if isinstance(asked, Chat):
            return self._prompt_of_chat(asked)
        return self._prompt_of_tokens(renderer.encode(asked) if isinstance(asked, str) else asked)

    def requests(self, call: Call, prompts: Sequence[Prompt], stops: tuple[int, ...]) -> list[GenerationRequest]:
        """One request per choice: the choices of the first prompt, then those of the second, …

        Raises:
            RequestError: no engine can serve it, or the caller may not ask for so much.
        """
        policy = self._policy
        requests: list[GenerationRequest] = []
        seed = secrets.randbits(62) if call.seed is None else call.seed
        for number, prompt in enumerate(prompts):
            for choice in range(call.choices):
                request = GenerationRequest(
                    request_id=f"{call.id}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=call.sampling(len(prompt.token_ids), stops, policy),
                    seed=derive_seed("gateway", seed, number, choice),
                )
                validate_request(request, max_model_len=policy.max_model_len, vocab_size=policy.renderer.vocab_size)
                requests.append(request)
        return requests

    def ignored(self, call: Call) -> Sequence[str]:
        """Options that the client set and that are not used."""
        return ()

    def answered(self, choice: Choice) -> None:
        """A choice is about to be handed out. Raises SessionOver when nobody may have it any more."""

    def failed(self, error: Exception) -> None:
        """A call was not answered."""

    def dropped(self, requests: Sequence[GenerationRequest]) -> None:
        """Those of them that were not answered will not be."""

    def _prompt_of_chat(self, chat: Chat) -> Prompt:
        return self._prompt_of_tokens(self._policy.renderer.render(chat.messages, chat.tools))

    def _prompt_of_tokens(self, token_ids: Sequence[int]) -> Prompt:
        return Prompt(token_ids=np.asarray(token_ids, dtype=np.int32))


class ApiKeys:
    """One key for everybody, or none."""

    def __init__(self, policy: ServedPolicy, api_key: str = "") -> None:
        """Must be made within a loop.

        Args:
            api_key: empty: none is asked for.
        """
        self.anybody = Caller(policy)
        """Who needs no key."""
        self._authorization = f"Bearer {api_key}".encode() if api_key else b""

    def caller(self, authorization: str) -> Caller | None:
        """Who sends this header; None: the key is missing or wrong."""
        right = not self._authorization or hmac.compare_digest(authorization.encode("latin-1"), self._authorization)
        return self.anybody if right else None

    def end_all(self) -> None:
        """The gateway closes: all calls end."""
        self.anybody.end(GatewayClosing("the gateway is being closed; the call was aborted"))


async def unless(work: Awaitable[T], end: asyncio.Future[E]) -> T:
    """The result of `work`; if `end` is done first, `work` is cancelled and the result of `end` is raised."""
    task = asyncio.ensure_future(_awaited(work))
    try:
        either: set[asyncio.Future[Any]] = {task, end}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise end.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _awaited(work: Awaitable[T]) -> T:
    return await work
