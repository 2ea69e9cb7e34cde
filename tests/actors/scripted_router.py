"""A router that samples by itself: what a rollout worker asks for comes back in full length, at once or later."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from titan_rl.errors import TitanError
from titan_rl.rpc.connection import endpoint
from titan_rl.rpc.requests import RequestServer
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion

VERSION = PolicyVersion(0, 3)


class ScriptedRouter(RequestServer):
    """Answers with `max_new_tokens` digits under `VERSION`; keeps requests back between `hold` and `let_go`."""

    def __init__(self) -> None:
        super().__init__()
        self._holding = False
        self._held: dict[str, GenerationRequest] = {}
        self._changed = asyncio.Event()  # set at the next change

    # What a rollout worker calls.

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._holding:
            self._held.update((request.request_id, request) for request in requests)
            self._notify()
        else:
            self.answer([sampled(request) for request in requests])

    def stop_requests(self, request_ids: Sequence[str]) -> None:
        aborted = [self._held.pop(each) for each in request_ids if each in self._held]
        self.answer([sampled(request, tokens=0) for request in aborted])
        self._notify()

    # What a test calls.

    @endpoint
    async def hold(self) -> None:
        self._holding = True

    @endpoint
    async def let_go(self) -> None:
        self._holding = False
        held, self._held = self._held, {}
        self.answer([sampled(request) for request in held.values()])

    @endpoint
    async def fail(self, error: TitanError) -> None:
        """What is held back fails."""
        held, self._held = self._held, {}
        self.answer([], [(request_id, error) for request_id in held])

    @endpoint
    async def wait_for_requests(self, count: int) -> None:
        """Until so many are held back."""
        while len(self._held) != count:
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def sampled(request: GenerationRequest, tokens: int | None = None) -> Completion:
    """Digits that the request's seed decides; `tokens` of them if it is aborted, else all that it may have."""
    count = request.sampling.max_new_tokens if tokens is None else tokens
    return Completion(
        request_id=request.request_id,
        token_ids=np.random.default_rng(request.seed).integers(2, 12, count, dtype=np.int32),
        logprobs=np.full(count, -0.5, np.float32),
        versions=np.full(count, VERSION.encode(), np.int64),
        finish_reason=FinishReason.LENGTH if tokens is None else FinishReason.ABORT,
    )
