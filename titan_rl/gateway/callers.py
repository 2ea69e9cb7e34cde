"""Maps an API key to its caller. The caller turns a call into generation requests.

There are two kinds of keys: one key for everybody, whose callers choose how to sample, and one key per rollout of a
run, whose calls become that rollout. The app treats both alike. Rules for a rollout's key:

- It is valid from `open` to `close` of its rollout. Calls with it belong to that rollout and to no other.
- A rollout is closed at once: its trajectory contains the calls answered until then, and open calls are aborted.
- The run decides how tokens are drawn: sampling options of a program are accepted and ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from titan_rl.errors import GatewayClosing, RequestError, RequestLost, RolloutOver, TaskError, TitanError
from titan_rl.gateway.calls import ApiError, Chat, Choice, CompletionCall, ServedPolicy
from titan_rl.generation.engine import validate_request
from titan_rl.rollout.trajectory import Prompt, RolloutRequest, Trajectory
from titan_rl.seeding import derive_seed
from titan_rl.types import Endpoint, GenerationRequest, SamplingParams

CALLER = "titan_rl.caller"
"""Where a call's ASGI scope has its `Caller`."""

Asked = tuple[Prompt, SamplingParams]
"""How its client wants the prompt to be completed."""


class Caller:
    """A client with the server's key. It chooses how to sample, and nothing about it is remembered."""

    def __init__(self, policy: ServedPolicy) -> None:
        """Must be made within a loop."""
        self._policy = policy
        self.ended: asyncio.Future[TitanError] = asyncio.get_running_loop().create_future()
        """Done when all open calls must end; its result is the error for their clients."""

    def end(self, reason: TitanError) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    @contextmanager
    def call_open(self) -> Iterator[None]:
        yield

    def prompt(self, content: Chat | str | list[int]) -> Prompt:
        """Runs in the render thread. Raises TaskError where the renderer cannot write it."""
        if isinstance(content, Chat):
            token_ids = self._policy.renderer.render(content.messages, content.tools)
        else:
            token_ids = self._tokens(content)
        return Prompt(token_ids=np.asarray(token_ids, dtype=np.int32))

    def asked(self, call: CompletionCall) -> list[Asked]:
        """Runs in the render thread. Raises TaskError: the renderer cannot write a prompt, or the form."""
        prompts = [*map(self.prompt, call.prompts)]
        lengths = [len(each.token_ids) for each in prompts]
        return [*zip(prompts, call.sampling(lengths, self._policy), strict=True)]

    def requests(self, call: CompletionCall, asked: Sequence[Asked]) -> list[GenerationRequest]:
        """One request per choice: the choices of the first prompt, then those of the second, … Raises RequestError: no
        engine can serve it, or it exceeds the caller's limits."""
        policy = self._policy
        requests: list[GenerationRequest] = []
        seed = secrets.randbits(62) if call.seed is None else call.seed
        for number, (prompt, sampling) in enumerate(asked):
            for choice in range(call.choices):
                request = GenerationRequest(
                    request_id=f"{call.id}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    seed=derive_seed("gateway", seed, number, choice),
                )
                validate_request(request, max_model_len=policy.max_model_len, vocab_size=policy.renderer.vocab_size)
                requests.append(request)
        return requests

    def ignored_options(self, call: CompletionCall) -> Sequence[str]:
        """Options that the client set and that are not used."""
        return ()

    def on_answer(self, choice: Choice) -> None:
        """Called before a choice is handed out. Raises RolloutOver if the rollout was closed."""

    def on_failure(self, error: Exception) -> None:
        """Called when a call failed."""

    def on_end(self, requests: Sequence[GenerationRequest]) -> None:
        """Called at the end of a call: requests that were not answered will not be."""

    def _tokens(self, text: str | list[int]) -> list[int]:
        return self._policy.renderer.encode(text) if isinstance(text, str) else text


class ApiKeys:
    """One key for everybody, or none."""

    def __init__(self, policy: ServedPolicy, api_key: str = "") -> None:
        self.anybody = Caller(policy)
        """The caller of paths that need no key."""
        self._key = api_key.encode()

    def caller(self, key: str) -> Caller | None:
        """Who has this key; None: it is empty or wrong."""
        right = not self._key or hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self._key)
        return self.anybody if right else None

    def end_all(self) -> None:
        """The gateway closes: all calls end."""
        self.anybody.end(GatewayClosing("the gateway is being closed; the call was aborted"))


class RolloutKeys(ApiKeys):
    """A key per open rollout; a `RolloutGateway` for rollout workers. Belongs to one loop."""

    def __init__(self, policy: ServedPolicy, *, base_url: str, run_seed: int) -> None:
        super().__init__(policy)
        self._policy = policy
        self._base_url = base_url  # where programs reach the gateway, with `/v1`
        self._run_seed = run_seed
        self._by_id: dict[str, RolloutCaller] = {}
        self._by_key: dict[bytes, RolloutCaller] = {}

    async def open(self, request: RolloutRequest) -> Endpoint:
        """Raises RequestError where a rollout of that id is open."""
        if request.session_id in self._by_id:
            raise RequestError(f"rollout {request.session_id} is open already")
        key = f"sk-{secrets.token_urlsafe(32)}"
        caller = RolloutCaller(request, self._policy, run_seed=self._run_seed, key_digest=_digest(key))
        self._by_id[request.session_id] = self._by_key[caller.key_digest] = caller
        return Endpoint(base_url=self._base_url, api_key=key, model=self._policy.name)

    async def idle(self, session_id: str, seconds: float) -> None:
        """Returns also when the rollout is closed. Raises RolloutOver where there is none."""
        await self._open(session_id).idle(seconds)

    async def close(self, session_id: str) -> Trajectory:
        caller = self._open(session_id)
        del self._by_id[session_id], self._by_key[caller.key_digest]
        trajectory = caller.close(RolloutOver("the rollout has ended; the call was aborted"))
        if caller.lost is not None:
            raise caller.lost
        return trajectory

    def caller(self, key: str) -> Caller | None:
        # Looked up by digest, so that timing reveals nothing about existing keys.
        return self._by_key.get(_digest(key))

    def end_all(self) -> None:
        super().end_all()
        for caller in self._by_id.values():
            caller.close(self.anybody.ended.result())
        self._by_id.clear()
        self._by_key.clear()

    def _open(self, session_id: str) -> RolloutCaller:
        if session_id not in self._by_id:
            raise RolloutOver(f"there is no open rollout {session_id}")
        return self._by_id[session_id]


class RolloutCaller(Caller):
    def __init__(self, request: RolloutRequest, policy: ServedPolicy, *, run_seed: int, key_digest: bytes) -> None:
        super().__init__(policy)
        self.key_digest = key_digest
        self.lost: RequestLost | None = None
        """Why the rollout is to be played again, whatever its program made of it."""
        self._trajectory = Trajectory(request, policy.renderer, run_seed=run_seed, max_model_len=policy.max_model_len)
        self._loop = asyncio.get_running_loop()
        self._open_calls = 0
        self._quiet = asyncio.Event()  # there is no open call, or there will be no more
        self._quiet.set()
        self._quiet_since = self._loop.time()

    async def idle(self, seconds: float) -> None:
        while not self.ended.done():
            await self._quiet.wait()
            left = self._quiet_since + seconds - self._loop.time()
            if left <= 0:
                return
            await asyncio.wait([self.ended], timeout=left)

    def close(self, reason: TitanError) -> Trajectory:
        """Close the rollout; returns its trajectory. Open calls end with `reason`."""
        self._trajectory.close()
        self.end(reason)
        self._quiet.set()
        return self._trajectory

    def prompt(self, content: Chat | str | list[int]) -> Prompt:
        if isinstance(content, Chat):
            return self._trajectory.prompt_of_chat(content.messages, content.tools)
        return self._trajectory.prompt_of_tokens(self._tokens(content))

    @contextmanager
    def call_open(self) -> Iterator[None]:
        self._open_calls += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._open_calls -= 1
            if not self._open_calls:
                self._quiet_since = self._loop.time()
                self._quiet.set()

    def requests(self, call: CompletionCall, asked: Sequence[Asked]) -> list[GenerationRequest]:
        if call.max_new_tokens == 0:
            raise ApiError(400, "max_new_tokens: a turn of a rollout has at least one", code="invalid_request")
        return self._trajectory.ask(call.id, asked, choices=call.choices, role=call.role)

    def ignored_options(self, call: CompletionCall) -> Sequence[str]:
        return [*call.drawing, *(["seed"] if call.seed is not None else [])]

    def on_answer(self, choice: Choice) -> None:
        completion = replace(choice.completion, prompt_logprobs=None)  # they would be kept, and nobody trains on them
        self._trajectory.answered(completion, choice.message, stopped=choice.stopped)

    def on_failure(self, error: Exception) -> None:
        if isinstance(error, RequestLost):
            self.lost = error
        elif isinstance(error, ApiError) and error.status >= 500:
            self._trajectory.record_failure(misread=error.message)
        elif not isinstance(error, (ApiError, RecursionError, RequestError, TaskError)):  # those are the program's own
            self._trajectory.record_failure(f"{type(error).__name__}: {error}")

    def on_end(self, requests: Sequence[GenerationRequest]) -> None:
        self._trajectory.dropped(each.request_id for each in requests)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@asynccontextmanager
async def cancelled_by(end: asyncio.Future[Any]) -> AsyncIterator[None]:
    """When `end` is done, what the block waits for is cancelled, and the result of `end` is raised. A task for the
    block alone would cost a call two more turns of the loop."""
    limit = asyncio.timeout(None)

    def expire(_: object) -> None:
        with suppress(RuntimeError):  # the block was left in this turn of the loop
            limit.reschedule(0)

    end.add_done_callback(expire)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise end.result() from None
        raise
    finally:
        end.remove_done_callback(expire)
