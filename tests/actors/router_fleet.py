"""A router over generators whose every move a test decides: real actors, real messages, no engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
from monarch.actor import this_proc

from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.errors import ActorGone, GeneratorFailed, WeightsError
from titan_rl.routing.config import RouterConfig
from titan_rl.rpc.connection import endpoint
from titan_rl.rpc.requests import RequestServer
from titan_rl.types import NO_VERSION, Completion, FinishReason, GenerationRequest, Piece, PolicyVersion, SamplingParams
from titan_rl.weights.manifest import Manifest, Publication

_serial = itertools.count()
SECONDS = 30.0


def request(request_id: str, *, step: int = 0, session: str | None = None) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=np.arange(3, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=9),
        seed=7,
        min_version=PolicyVersion(0, step),
        session_id=session,
    )


async def streamed(client: RouterClient, each: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
    """What `RouterClient.stream` tells, and then its completion."""
    told: asyncio.Queue[Piece | None] = asyncio.Queue()
    call = asyncio.create_task(client.stream(each, told.put_nowait))
    call.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (piece := await told.get()) is not None:
            yield piece
        yield call.result()
    finally:
        call.cancel()


class Fleet:
    """A router over scripted generators, all serving v0."""

    def __init__(self, config: RouterConfig, count: int = 2, awaited: tuple[str, ...] = ()) -> None:
        self.generators: list[Any] = [_scripted() for _ in range(count)]
        handles = {f"g{index}": handle for index, handle in enumerate(self.generators)}
        actor = this_proc().spawn(f"router{next(_serial)}", GeneratorRouter, config, handles, None, awaited)
        self.router = RouterClient(actor, seconds=SECONDS)
        self._clients: dict[asyncio.Task[Completion], RouterClient] = {}

    async def __aenter__(self) -> Fleet:
        await self.router.pull_model_state_dict(publication(0))
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.disconnect()
        await self.router.close()
        for actor in (self.router.actor, *self.generators):
            await actor.stop()

    def generate(self, each: GenerationRequest) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.router.generate(each))

    async def kill(self, index: int) -> None:
        await self.router.call(GeneratorRouter.generator_lost, f"g{index}", "it was killed")

    async def replace(self, index: int, *, hold_pulls: bool = False) -> Any:
        """Another generator takes the place of a dead one. Returns that."""
        before, self.generators[index] = self.generators[index], _scripted()
        if hold_pulls:
            await self.on(index, "hold_pulls")
        await self.router.call(GeneratorRouter.generator_joined, f"g{index}", self.generators[index])
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
        return streamed(self.router, each)

    def pull(self, *steps: int) -> asyncio.Task[Any]:
        """Have these served, and no others; done when the newest is."""
        return asyncio.create_task(self.router.pull_model_state_dict(*map(publication, steps)))

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


def publication(step: int, incarnation: int = 0) -> Publication:
    return Publication(
        channel="policy",
        version=PolicyVersion(incarnation, step),
        manifest=Manifest(entries=(), nbytes=8),
        location="nowhere",
    )


class ScriptedGenerator(RequestServer):
    """Takes requests and pulls like rank 0 of a generator; they end when the test says so.

    Requests run until `finish`; an aborted one comes back with the tokens that `progress` gave it, and one that streams
    has handed them out. Pulls end at once
    unless `hold_pulls`, and fail as often as `fail_pulls` says.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[str, GenerationRequest] = {}
        self._progress: dict[str, int] = {}
        self._handed_out: dict[str, int] = {}
        self._version: PolicyVersion | None = None
        self._pulls: list[str] = []
        self._pulling = 0
        self._failures = 0
        self._fatal = False
        self._may_pull = asyncio.Event()
        self._may_pull.set()
        self._changed = asyncio.Event()  # set at the next change
        self._asleep = False
        self.failed = ""

    # What a router calls.

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._live[request.request_id] = request
        self._notify()

    def stop_requests(self, request_ids: Sequence[str]) -> None:
        self._answer([each for each in request_ids if each in self._live], FinishReason.ABORT, self._progress)

    @endpoint
    async def pull_model_state_dict(self, publication: Publication) -> PolicyVersion:
        return await self._pull(publication)

    @endpoint
    async def wake_up(self, publication: Publication) -> PolicyVersion:
        self._asleep = False
        return await self._pull(publication)

    @endpoint
    async def sleep(self) -> int:
        self._asleep = True
        self._answer(list(self._live), FinishReason.ABORT, self._progress)
        return 0

    @endpoint
    async def fail(self, reason: str) -> None:
        self.failed = reason
        self._notify()

    # What a test calls.

    @endpoint
    async def until_failed(self) -> str:
        await self._until(lambda: bool(self.failed))
        return self.failed

    @endpoint
    async def hold_pulls(self) -> None:
        self._may_pull.clear()

    @endpoint
    async def release_pulls(self) -> None:
        self._may_pull.set()

    @endpoint
    async def fail_pulls(self, times: int, fatal: bool = False) -> None:
        """A fatal failure says that the generator is gone, and answers no request."""
        self._failures, self._fatal = times, fatal

    @endpoint
    async def progress(self, tokens: int) -> None:
        """Every running request has sampled so many tokens by now."""
        self._progress = dict.fromkeys(self._live, tokens)
        pieces = []
        for request in self._live.values():
            if request.streams:
                start = self._handed_out.get(request.request_id, 0)
                self._handed_out[request.request_id] = tokens
                pieces.append(
                    Piece(
                        request_id=request.request_id,
                        offset=request.stream_from + start,
                        token_ids=_tokens(request, start, tokens),
                        logprobs=np.full(tokens - start, -0.5, np.float32),
                        versions=np.full(tokens - start, self._encoded(), np.int64),
                    )
                )
        self.send_pieces(pieces)

    @endpoint
    async def die(self) -> None:
        """Every request fails as those of a generator that is gone."""
        lost, self._live = list(self._live), {}
        self.answer([], [(request_id, GeneratorFailed("it was killed")) for request_id in lost])

    @endpoint
    async def finish(self, request_ids: list[str], tokens: int) -> None:
        self._answer(request_ids, FinishReason.STOP, dict.fromkeys(request_ids, tokens))

    @endpoint
    async def wait_for_requests(self, count: int) -> dict[str, GenerationRequest]:
        """The live requests, once there are so many."""
        await self._until(lambda: len(self._live) == count)
        return dict(self._live)

    @endpoint
    async def wait_for_request(self, request_id: str) -> None:
        """Until this one runs here."""
        await self._until(lambda: request_id in self._live)

    @endpoint
    async def wait_for_pull(self) -> None:
        await self._until(lambda: self._pulling > 0)

    @endpoint
    async def pulls(self) -> list[str]:
        """Versions that were asked for, in order."""
        return self._pulls

    async def _pull(self, publication: Publication) -> PolicyVersion:
        self._pulls.append(str(publication.version))
        self._pulling += 1
        self._notify()
        await self._may_pull.wait()
        self._pulling -= 1
        if self._failures:
            self._failures -= 1
            if self._fatal:
                raise ActorGone("it was killed in its pull")
            self._answer(list(self._live), FinishReason.ABORT, self._progress)
            raise WeightsError("lm_head.weight is not what was published")
        self._version = publication.version
        return self._version

    def _answer(self, request_ids: list[str], reason: FinishReason, tokens: dict[str, int]) -> None:
        completions = []
        for request_id in request_ids:
            request = self._live.pop(request_id)
            count = tokens.get(request_id, 0)
            completions.append(
                Completion(
                    request_id=request_id,
                    token_ids=_tokens(request, 0, count),
                    logprobs=np.full(count, -0.5, np.float32),
                    versions=np.full(count, self._encoded(), np.int64),
                    finish_reason=reason,
                )
            )
        self.answer(completions)
        self._notify()

    def _encoded(self) -> int:
        return NO_VERSION if self._version is None else self._version.encode()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


def _tokens(request: GenerationRequest, start: int, end: int) -> np.ndarray:
    """A token is its position in prompt and completion."""
    first = len(request.prompt_token_ids)
    return np.arange(first + start, first + end, dtype=np.int32)
