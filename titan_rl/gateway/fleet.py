"""What the gateway asks of whoever stands behind it, and how it waits for that.

- Every attempt has a request id of its own, and ends with the call that asked for it: answered, failed, or aborted in
  the engine because the client hung up.
- There is no bound on the time of an answer. A dead fleet fails its requests; a client that has waited long enough
  hangs up.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.types import Receive

from titan_rl.errors import GeneratorFailed, TitanError
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece

T = TypeVar("T")


class Member(Protocol):
    """One generator, as the router reports it."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def served(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def last_error(self) -> str: ...


class Fleet(Protocol):
    """The generators behind the gateway."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion. Cancelling the call aborts the engine's work.

        Raises:
            RequestError: the request is invalid.
            TitanError: nobody can serve it; the cause is in the message.
        """

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
        """The same in pieces, as they are sampled, and then whole, at once after the last piece. Closing it aborts the
        engine's work."""

    async def fleet_status(self) -> Sequence[Member]:
        """Every generator; raises TitanError when the router does not answer."""


class ClientGone(Exception):
    """The client hung up; what it asked for was aborted."""


async def unless_gone(work: Awaitable[T], receive: Receive, over: asyncio.Future[TitanError]) -> T:
    """The result of `work`, which is cancelled when the client hangs up first, or the call must end.

    Args:
        receive: of a call whose body was read.
        over: `Visit.over`.

    Raises:
        ClientGone: it did.
        TitanError: the result of `over`.
    """
    task = asyncio.ensure_future(_awaited(work))
    gone = asyncio.ensure_future(_hung_up(receive))
    try:
        first: set[asyncio.Future[Any]] = {task, gone, over}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if over.done():
            raise over.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def as_finished(
    fleet: Fleet, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, Completion], None]:
    """Position and completion of every request, as they finish. The first failure, or leaving early, aborts the others.

    Raises:
        TitanError: as `Fleet.generate`, and for a completion that somebody else aborted.
    """
    positions = {asyncio.ensure_future(_finished(fleet, each)): index for index, each in enumerate(requests)}
    pending = set(positions)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=positions.__getitem__):
                yield positions[task], task.result()
    finally:
        for task in positions:
            task.cancel()
        await asyncio.gather(*positions, return_exceptions=True)


async def _finished(fleet: Fleet, request: GenerationRequest) -> Completion:
    return _whole(await fleet.generate(request))


def _whole(completion: Completion) -> Completion:
    if completion.finish_reason is FinishReason.ABORT:
        raise GeneratorFailed(
            f"the completion was aborted after {len(completion.token_ids)} tokens: the fleet is being stopped"
        )
    return completion


class Sampled:
    """What the engines sample for several requests, as it comes. The first failure ends it; `aclose` aborts what is
    left.

    What waits for a slow reader is put together: pieces of one request become one, or their completion, so that a
    reader is never further behind than what was sampled while it was busy. The last tokens come as the completion.
    """

    def __init__(self, fleet: Fleet, requests: Sequence[GenerationRequest]) -> None:
        self._waiting: deque[tuple[int, Piece | Completion]] = deque()
        self._failure: BaseException | None = None
        self._came = asyncio.Event()
        self._open: dict[int, asyncio.Task[None]] = {}
        for index, request in enumerate(requests):
            task = asyncio.ensure_future(self._pump(fleet, index, request))
            self._open[index] = task
            task.add_done_callback(functools.partial(self._ended, index))

    async def next(self) -> tuple[int, Piece | Completion] | None:
        """Position of a request, and what was sampled for it; its completion is the last. None: all have ended.

        Raises:
            TitanError: as `Fleet.stream`, and for a completion that somebody else aborted.
        """
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            if not self._open:
                return None
            self._came.clear()
            await self._came.wait()
        index, what = self._waiting.popleft()
        pieces: list[Piece] = []
        while isinstance(what, Piece):
            pieces.append(what)
            if not self._waiting or self._waiting[0][0] != index:
                return index, Piece.join(pieces)
            what = self._waiting.popleft()[1]
        return index, what

    async def end(self, index: int) -> None:
        """Nothing more is wanted of this request."""
        task = self._open.get(index)
        self._waiting = deque(each for each in self._waiting if each[0] != index)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def aclose(self) -> None:
        """Nothing more is wanted."""
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, fleet: Fleet, index: int, request: GenerationRequest) -> None:
        async with aclosing(fleet.stream(request)) as stream:
            async for each in stream:
                self._waiting.append((index, each if isinstance(each, Piece) else _whole(each)))
                self._came.set()

    def _ended(self, index: int, task: asyncio.Task[None]) -> None:
        del self._open[index]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._came.set()
