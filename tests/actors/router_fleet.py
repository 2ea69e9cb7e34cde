"""A router over generators whose every move a test decides: real actors, real messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from monarch.actor import this_proc
from scripted_generator import ScriptedGenerator, publication

from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.routing.config import RouterConfig
from titan_rl.types import Completion, GenerationRequest, Piece, PolicyVersion, SamplingParams

_serial = itertools.count()
SECONDS = 30.0


def request(
    request_id: str,
    *,
    step: int = 0,
    session: str | None = None,
    budget: int = 9,
    penalty: float = 0.0,
    pinned_to: str | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=np.arange(3, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=budget, presence_penalty=penalty),
        seed=7,
        min_version=PolicyVersion(0, step),
        session_id=session,
        pinned_to=pinned_to,
    )


class Fleet:
    """A router over scripted generators, all serving v0."""

    def __init__(
        self, config: RouterConfig, count: int = 2, serving: int | None = None, awaited: tuple[str, ...] = ()
    ) -> None:
        self.generators: list[Any] = [_scripted() for _ in range(count)]
        handles = {f"g{index}": handle for index, handle in enumerate(self.generators)}
        actor = this_proc().spawn(f"router{next(_serial)}", GeneratorRouter, config, handles, serving, awaited)
        self.router = RouterClient(actor, seconds=SECONDS)
        self._clients: dict[asyncio.Task[Completion], RouterClient] = {}

    async def __aenter__(self) -> Fleet:
        await self.router.pull_model_state_dict(publication(0))
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.disconnect()
        await self.router.close()

    def generate(self, each: GenerationRequest) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.router.generate(each))

    async def kill(self, index: int) -> None:
        await self.router.generator_lost(f"g{index}", "it was killed")

    async def replace(self, index: int, *, hold_pulls: bool = False) -> Any:
        """Another generator takes the place of a dead one. Returns that."""
        before, self.generators[index] = self.generators[index], _scripted()
        if hold_pulls:
            await self.on(index, "hold_pulls")
        await self.router.generator_joined(f"g{index}", self.generators[index])
        return before

    async def ask(self, request_id: str, step: int = 0, who: str = "") -> asyncio.Task[Completion]:
        """The same of a client of its own; the router has the request when this returns."""
        client = RouterClient(self.router.actor, seconds=SECONDS, who=who)
        call = asyncio.create_task(client.generate(request(request_id, step=step)))
        self._clients[call] = client
        await asyncio.sleep(0)  # it is in the tick's message
        await asyncio.sleep(0)
        await client.fleet_status()  # the router takes the messages of a client in order
        return call

    async def abort(self, call: asyncio.Task[Completion]) -> None:
        """Cancel what was asked; the router has heard of it when this returns."""
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await self._clients[call].fleet_status()

    def stream(self, each: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
        return self.router.stream(each)

    def pull(self, step: int, incarnation: int = 0) -> asyncio.Task[Any]:
        return asyncio.create_task(self.router.pull_model_state_dict(publication(step, incarnation)))

    async def states(self) -> list[str]:
        return [status.state for status in await self.router.fleet_status()]

    async def until_states(self, *states: str) -> None:
        async def wait() -> None:
            while await self.states() != list(states):
                pass  # each look is a round trip

        await asyncio.wait_for(wait(), SECONDS)

    async def in_flight(self, count: int) -> list[int]:
        """The generators that the router has requests on, once it has `count` in all.

        Its books are not those of a generator: it hears of an end after the generator, and after the caller too.
        """

        async def wait() -> list[int]:
            while True:
                statuses = await self.router.fleet_status()
                if sum(status.in_flight for status in statuses) == count:
                    assert count or not any(status.load for status in statuses)
                    return [index for index, status in enumerate(statuses) if status.in_flight]

        return await asyncio.wait_for(wait(), SECONDS)

    async def live(self, index: int, count: int) -> dict[str, GenerationRequest]:
        return await asyncio.wait_for(_call(self.generators[index].wait_for_requests, count), SECONDS)

    async def on(self, index: int, endpoint: str, *args: Any) -> Any:
        return await asyncio.wait_for(_call(getattr(self.generators[index], endpoint), *args), SECONDS)

    async def until_runs(self, request_id: str) -> int:
        """The generator that has the request. That its router has sent it is not enough to act on it there."""
        calls = [_call(generator.wait_for_request, request_id) for generator in self.generators]
        waits = [asyncio.create_task(call) for call in calls]
        done, late = await asyncio.wait(waits, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in late:
            wait.cancel()
        (first,) = done
        return waits.index(first)


def _scripted() -> Any:
    return this_proc().spawn(f"scripted{next(_serial)}", ScriptedGenerator)


async def _call(endpoint: Any, *args: Any) -> Any:
    return await endpoint.call_one(*args)
