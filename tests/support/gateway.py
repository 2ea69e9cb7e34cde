"""Gateways of tests: over a real router and engines that say what a prompt tells them to (own processes), and the
app alone, over a fleet that says what the test wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from openai import AsyncOpenAI

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.config import PlacementConfig, RunConfig, ServeConfig
from titan_rl.gateway.app import build_app
from titan_rl.gateway.callers import ApiKeys
from titan_rl.gateway.calls import Fleet, ServedPolicy
from titan_rl.gateway.config import GatewayConfig
from titan_rl.generation.config import GeneratorConfig
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig, TrainerConfig
from titan_rl.rollout.trajectory import RolloutRequest
from titan_rl.run.start import bring_up
from titan_rl.supervision.supervisor import Supervisor
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupRequest,
    Piece,
    PolicyVersion,
    Purpose,
    SamplingParams,
    sampled_arrays,
)

MODEL = "policy"
LENGTH = 2_000_000
ENGINE = f"{Path(__file__).with_name('gateway_engines.py')}:obedient_engine"
SYMBOLS = "0123456789+="
TOOL_SYMBOLS = ("<tool>", "</tool>", "<result>", "</result>")

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {"type": "object", "properties": {"terms": {"type": "string"}}, "required": ["terms"]},
    },
}


@asynccontextmanager
async def served(
    *,
    generators: int,
    gateway: GatewayConfig | None = None,
    length: int = LENGTH,
    engine: str = ENGINE,
    placement: PlacementConfig | None = None,
) -> AsyncIterator[Supervisor]:
    config = RunConfig(
        policy=PolicyConfig(
            tiny=TinyPolicyConfig(symbols=SYMBOLS, special_tokens=TOOL_SYMBOLS, max_length=length, seed=5)
        ),
        generator=GeneratorConfig(count=generators, engine=engine, max_model_len=length, max_num_batched_tokens=length),
        trainer=TrainerConfig(max_tokens_per_microbatch=length),
        placement=placement or PlacementConfig(),
    )
    async with bring_up(ServeConfig.of(config, gateway or GatewayConfig(port=0, model=MODEL))) as up:
        yield up


def client(up: Supervisor, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{up.gateway.url}/v1", api_key=key)


def say(text: str) -> list[Any]:
    """A conversation that the engine answers with `text`."""
    return [{"role": "user", "content": f"+{text}"}]


async def until_idle(up: Supervisor) -> None:
    """Returns when no generator runs a request; each look is an answer of the router."""
    while await in_flight(up):
        pass


async def until_busy(up: Supervisor, requests: int) -> None:
    while await in_flight(up) < requests:
        pass


async def in_flight(up: Supervisor) -> int:
    return sum(member.in_flight for member in await up.router.fleet_status())


# The app alone.


def policy_of(renderer: SymbolRenderer, length: int, name: str = MODEL) -> ServedPolicy:
    return ServedPolicy(name=name, renderer=renderer, max_model_len=length)


def app_over(fleet: Fleet, policy: ServedPolicy, keys: ApiKeys | None = None) -> Any:
    """Must be called within a loop."""
    return build_app(GatewayConfig(model=policy.name), fleet, policy, keys or ApiKeys(policy))


def http_client(app: Any, key: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)


def session_request(session_id: str, *, tokens: int = 40, **options) -> RolloutRequest:
    group = GroupRequest(
        group_id=0,
        purpose=Purpose.TRAIN,
        samples=2,
        sampling=SamplingParams(max_new_tokens=tokens, temperature=1.0),
        min_version=PolicyVersion(0, 0),
    )
    return RolloutRequest(
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

    async def stream(self, request: GenerationRequest, on_piece: Callable[[Piece], object]) -> Completion:
        completion = await self.generate(request)
        for place in range(len(completion.token_ids)):
            sampled = sampled_arrays(completion, start=place, end=place + 1)
            on_piece(Piece(request_id=request.request_id, offset=place, **sampled))
        return completion

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
