"""`Generator`: one tensor-parallel rank of a generator mesh, and `GeneratorMesh`, the handle of all its ranks.

All engine work happens in the loop's one thread; this actor only moves messages, so it answers within milliseconds
however long an engine step takes. Rank 0 takes requests and pulls; the other ranks follow its broadcast decisions.

A generator dies as a whole, for one reason. A rank whose engine loop fails ends its process: a follower tells rank 0
why before that, and rank 0 fails every request and call with the cause. The end of one process breaks the collectives
of the others, which then fail and end in the same way. So a generator that is up is whole, whatever its size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import current_rank

from titan_rl.actors.calls import served
from titan_rl.actors.connection import Connection
from titan_rl.actors.requests import RequestServer
from titan_rl.errors import GeneratorFailed, TitanError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.reports import PullReport
from titan_rl.types import Completion, GenerationRequest, Piece
from titan_rl.weights.manifest import Publication

FATAL_EXIT_CODE = 70
"""Exit code of a rank whose generator is lost (EX_SOFTWARE)."""

FAREWELL_SECONDS = 1.0
"""How long a lost rank lives on, so that what it said about the cause is delivered."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Generator(RequestServer):
    """One rank. Endpoints of rank 0: `generate_many`, `abort`, `pull_model_state_dict`, `sleep`, `wake_up`; of every
    rank: `setup`, `close`."""

    def __init__(self, mesh: str, config: GeneratorConfig, *, model_path: str, device: str) -> None:
        super().__init__()
        self._name = mesh
        self._config = config
        self._model_path = Path(model_path)
        self._device = device
        self._rank = int(current_rank().rank)
        self._rank0: Connection | None = None
        self._loop: EngineLoop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._lost: TitanError | None = None  # why this generator can serve no more
        self._loss = asyncio.Event()  # set with it
        self._farewell: asyncio.Task[None] | None = None

    @served
    async def setup(self, rank0: Any) -> int:
        """Build the engine and start its loop. Serves nothing until the first verified pull.

        Args:
            rank0: handle of this generator's rank 0, for a follower that fails.

        Returns:
            This process's id.
        """
        from titan_rl.generation.rank import make_engine_loop

        self._rank0 = Connection(rank0, what=f"{self._name}.{{}} of rank 0")
        self._event_loop = asyncio.get_running_loop()
        self._loop = make_engine_loop(
            self._config,
            model_path=self._model_path,
            device=self._device,
            on_completions=self._completed,
            on_pieces=self._sampled,
            on_fatal=self._failed,
        )
        started = time.monotonic()
        await self._outcome(self._loop.start())
        _log.info("%s rank %d is ready after %.1f s", self._name, self._rank, time.monotonic() - started)
        return os.getpid()

    def take(self, requests: Sequence[GenerationRequest]) -> None:
        try:
            verdicts: list[TitanError | None] = list(self._running().submit(requests))
        except GeneratorFailed as error:
            verdicts = [self._named(error)] * len(requests)
        self.answer([], [(r.request_id, error) for r, error in zip(requests, verdicts, strict=True) if error])

    def give_up(self, request_ids: Sequence[str]) -> None:
        with contextlib.suppress(GeneratorFailed):  # what a lost generator had is answered already
            self._running().abort(request_ids)

    @served
    async def pull_model_state_dict(self, publication: Publication) -> PullReport:
        """Take these weights between two engine steps, verify them, serve them.

        Raises:
            WeightsError: the engine does not compute with what was published; it serves nothing now.
        """
        report = await self._outcome(self._running().pull(publication))
        _log.info("serving %s: %s", report.version, report)
        return report

    @served
    async def sleep(self) -> int:
        """Stop serving and give up what memory the engine can give up; requests in flight come back aborted.

        Returns:
            The bytes that rank 0 really freed; 0 on CPU, where vLLM can free nothing.

        Raises:
            GeneratorNotServing: a wake-up is under way.
        """
        return await self._outcome(self._running().sleep())

    @served
    async def wake_up(self, publication: Publication) -> PullReport:
        """Take the memory back, load these weights, verify them, serve them: the only way out of sleep.

        Raises:
            GeneratorNotServing: it is just falling asleep.
            WeightsError: the engine does not compute with what was published; it serves nothing now.
        """
        report = await self._outcome(self._running().wake_up(publication))
        _log.info("awake, serving %s: %s", report.version, report)
        return report

    @served
    async def peer_failed(self, reason: str) -> None:
        """A follower says why it ends; called on rank 0."""
        self._lose(GeneratorFailed(reason))

    @served
    async def close(self) -> None:
        """End the loop. Rank 0's decision ends it on all ranks; the others wait for that."""
        if self._loop is not None and self._lost is None:
            await self._outcome(self._loop.close())
        error = GeneratorFailed(f"{self._name} was closed")
        self.answer([], [(request_id, error) for request_id in self.live()])

    def _running(self) -> EngineLoop:
        if self._lost is not None:
            raise self._lost
        if self._loop is None:
            raise GeneratorFailed(f"{self._name} rank {self._rank} was called before setup")
        return self._loop

    async def _outcome(self, future: Future[T]) -> T:
        """What the loop answers, or why this generator is lost, whichever comes first.

        A caller that goes away must not cancel the future: the engine thread will still resolve it.
        """
        answer = asyncio.wrap_future(future)
        loss = asyncio.get_running_loop().create_task(self._loss.wait())
        first: set[asyncio.Future[Any]] = {answer, loss}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loss.cancel()
            # Nobody will look at an answer that comes too late.
            answer.add_done_callback(lambda late: late.exception())
        if self._lost is not None:
            raise self._lost
        try:
            return answer.result()
        except GeneratorFailed as error:
            raise self._named(error) from error

    def _named(self, error: GeneratorFailed) -> TitanError:
        """The loop's error under this generator's name; the reason of its loss where that is known by now."""
        if self._lost is not None:
            return self._lost
        return type(error)(f"{self._name}: {error}")

    def _completed(self, completions: list[Completion]) -> None:
        """From the engine thread."""
        assert self._event_loop is not None
        named = [replace(completion, generator=self._name) for completion in completions]
        self._event_loop.call_soon_threadsafe(self.answer, named)

    def _sampled(self, pieces: list[Piece]) -> None:
        """From the engine thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self.hand_out, pieces)

    def _failed(self, error: BaseException) -> None:
        """From the engine thread, once: the loop is over."""
        assert self._event_loop is not None
        _log.error("the engine loop of %s rank %d failed", self._name, self._rank, exc_info=error)
        cause = GeneratorFailed(f"{self._name} rank {self._rank} failed: {type(error).__name__}: {error}")
        self._event_loop.call_soon_threadsafe(self._lose, cause)

    def _lose(self, cause: GeneratorFailed) -> None:
        """The first cause is kept: what follows (a broken collective) follows from it."""
        if self._lost is None:
            self._lost = cause
            self._loss.set()
            self.answer([], [(request_id, cause) for request_id in self.live()])
            self._farewell = asyncio.get_running_loop().create_task(self._leave(cause))

    async def _leave(self, cause: GeneratorFailed) -> None:
        """A rank that lost lockstep must not stay in any collective: its exit breaks those of the others at once."""
        try:
            if self._rank == 0:
                await asyncio.sleep(FAREWELL_SECONDS)
            elif self._rank0 is not None:
                await self._rank0.call(FAREWELL_SECONDS, Generator.peer_failed, str(cause))
        except TitanError as error:
            _log.error("rank 0 could not be told: %s", error)
        finally:
            _log.error("%s rank %d ends: %s", self._name, self._rank, cause)
            logging.shutdown()
            os._exit(FATAL_EXIT_CODE)


class GeneratorMesh:
    """All ranks of one generator as one object. Belongs to one event loop."""

    def __init__(self, mesh: Any, name: str, *, ranks: int) -> None:
        """
        Args:
            mesh: handle of all ranks.
        """
        self.rank0 = mesh.slice(ranks=0)
        """Handle of the rank that takes requests and pulls: what a router is given."""
        self.ranks = [Connection(mesh.slice(ranks=rank), what=f"{name}.{{}} of rank {rank}") for rank in range(ranks)]

    async def setup(self, *, seconds: float) -> list[int]:
        """Build the engine on every rank; returns their process ids. The first rank that fails ends the wait, while the
        others still wait for it."""
        return await asyncio.gather(*(rank.call(seconds, Generator.setup, self.rank0) for rank in self.ranks))

    async def close(self) -> None:
        """End the engine loop on every rank. The caller bounds it."""
        await asyncio.gather(*(rank.call(None, Generator.close) for rank in self.ranks))
