"""What tests of sessions have in common: requests for them, and a fleet that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import numpy as np

from titan_rl.chat.symbol_renderer import SymbolRenderer
from titan_rl.rollout.session import SessionRequest
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupRequest,
    Piece,
    PolicyVersion,
    Purpose,
    SamplingParams,
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {"type": "object", "properties": {"terms": {"type": "string"}}, "required": ["terms"]},
    },
}


def session_request(session_id: str, *, tokens: int = 40, **options) -> SessionRequest:
    group = GroupRequest(
        group_id=0,
        purpose=Purpose.TRAIN,
        samples=2,
        sampling=SamplingParams(max_new_tokens=tokens, temperature=1.0),
        min_version=PolicyVersion(0, 0),
    )
    return SessionRequest(
        **{"session_id": session_id, "group": group, "sample": 0, "max_turns": 100, "max_sampled_tokens": 0, **options}
    )


class ScriptedFleet:
    """Says one text after the other, `$` being the end of the turn; an exception is raised; None is never answered."""

    def __init__(self, renderer: SymbolRenderer, *texts: str | Exception | None) -> None:
        self._renderer = renderer
        self._texts = list(texts)
        self.asked: list[GenerationRequest] = []
        self.open = 0
        self.changed = asyncio.Condition()

    async def generate(self, request: GenerationRequest) -> Completion:
        text = self._texts[len(self.asked)]
        self.asked.append(request)
        if isinstance(text, Exception):
            raise text
        if text is None:
            await self._never()
        tokens = self._renderer.encode(text.replace("$", "<eos>"))
        return Completion(
            request_id=request.request_id,
            token_ids=np.array(tokens, np.int32),
            logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
            versions=np.full(len(tokens), 3, np.int64),
            finish_reason=FinishReason.STOP
            if tokens and tokens[-1] in self._renderer.stop_token_ids
            else FinishReason.LENGTH,
        )

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
        completion = await self.generate(request)
        for place in range(len(completion.token_ids)):
            yield Piece(
                request_id=request.request_id,
                offset=place,
                token_ids=completion.token_ids[place : place + 1],
                logprobs=completion.logprobs[place : place + 1],
                versions=completion.versions[place : place + 1],
            )
        yield completion

    async def until(self, open_requests: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.open == open_requests)

    async def _never(self) -> None:
        try:
            await self._count(1)
            await asyncio.get_running_loop().create_future()
        finally:
            await self._count(-1)

    async def _count(self, change: int) -> None:
        self.open += change
        async with self.changed:
            self.changed.notify_all()

    async def fleet_status(self) -> list[SimpleNamespace]:
        return []
