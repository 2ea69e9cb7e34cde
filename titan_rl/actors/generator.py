"""`Generator`: one tensor-parallel rank of a generator mesh.

All engine work happens in the loop's one thread; this actor only moves messages, so it answers within
milliseconds however long an engine step takes. Rank 0 takes requests and pulls; the other ranks follow its
broadcast decisions.

A generator is lost as a whole, once, for one reason. A follower whose loop fails tells rank 0 why and exits; one that
is killed breaks rank 0's next collective. Either way rank 0 fails every outstanding and every later call at once with
that reason, instead of waiting for a collective to time out. When rank 0's own loop fails it answers its callers, then
dismisses the followers, which would else sit in a collective for as long as the mesh lives; it stays to say why.
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

import cloudpickle
from monarch.actor import Channel, current_rank

from titan_rl.actors.calls import served
from titan_rl.actors.connection import ConnectedActor, Connection
from titan_rl.actors.reply_desk import Reply, ReplyDesk
from titan_rl.errors import GeneratorFailed, TitanError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.reports import LoopStatus, PullReport
from titan_rl.types import Completion, GenerationRequest, Piece
from titan_rl.weights.manifest import Publication

FATAL_EXIT_CODE = 70
"""Exit code of a follower whose engine loop failed, or rank 0's did (EX_SOFTWARE)."""

PEER_REPORT_SECONDS = 5.0
"""How long a failing follower tries to tell rank 0 why before it exits."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Generator(ConnectedActor):
    """One rank. Endpoints of rank 0: `generate_many`, `generate`, `abort`, `pull_model_state_dict`, `sleep`,
    `wake_up`; of every rank: `setup`, `status`, `close`."""

    def __init__(self, name: str, config: GeneratorConfig, *, model_path: str, device: str) -> None:
        self._name = name
        self._config = config
        self._model_path = Path(model_path)
        self._device = device
        self._rank = int(current_rank().rank)
        self._desk = ReplyDesk()
        self._loop: EngineLoop | None = None
        self._rank0: Connection | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._farewell: asyncio.Task[None] | None = None
        self._dismissed: asyncio.Task[None] | None = None  # on a follower: waits for rank 0's word
        self._followers: list[Any] = []  # on rank 0: the ports that wait for it
        self._lost: TitanError | None = None  # why this generator can serve no more
        self._loss = asyncio.Event()  # set with it

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
        if self._rank != 0:
            port, receiver = Channel[str].open()
            self._dismissed = asyncio.get_running_loop().create_task(self._leave_when_told(receiver))
            # Rank 0 may still be importing; the whole of `setup` has its caller's bound.
            await self._rank0.call(None, Generator.enlist, cloudpickle.dumps(port))
        started = time.monotonic()
        await self._outcome(self._loop.start())
        _log.info("%s rank %d is ready after %.1f s", self._name, self._rank, time.monotonic() - started)
        return os.getpid()

    @served
    async def generate_many(self, address: bytes, connection: int) -> None:
        """Serve one client's requests until it leaves; answers go to its reply port as they finish. See `transport`."""
        await self._desk.attend(address, connection, self._take, self._give_up)

    @served
    async def generate(self, request: GenerationRequest) -> Completion:
        """One request."""
        return await self._desk.one(request, self._take)

    @served
    async def abort(self, request_ids: list[str]) -> None:
        """Stop working on these; each is answered with the tokens it has."""
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
    async def status(self) -> LoopStatus:
        """The loop in plain numbers: version, requests, decisions, digest. Answers a lost generator's caller too."""
        if self._loop is None:
            raise GeneratorFailed(f"{self._name} rank {self._rank} was called before setup")
        status = self._loop.status()
        return status if self._lost is None else replace(status, failure=str(self._lost))

    @served
    async def enlist(self, follower: bytes) -> None:
        """A follower says at which pickled port it waits for its dismissal; called on rank 0."""
        self._followers.append(cloudpickle.loads(follower))

    @served
    async def peer_failed(self, rank: int, reason: str) -> None:
        """A follower says why it exits; called on rank 0."""
        self._lose(GeneratorFailed(f"{self._name}: rank {rank} failed: {reason}"))

    @served
    async def close(self) -> None:
        """End the loop. Rank 0's decision ends it on all ranks; the others wait for that."""
        if self._loop is not None and self._lost is None:
            await self._outcome(self._loop.close())
        self._desk.close(GeneratorFailed(f"{self._name} was closed"))

    def _take(self, requests: Sequence[GenerationRequest], reply: Reply) -> None:
        # Registered first: a completion may be ready before `submit` returns.
        accepted = self._desk.open(requests, reply)
        try:
            verdicts: list[TitanError | None] = list(self._running().submit(accepted))
        except GeneratorFailed as error:
            verdicts = [self._named(error)] * len(accepted)
        refused = [(r.request_id, error) for r, error in zip(accepted, verdicts, strict=True) if error is not None]
        self._desk.answer([], refused)

    def _give_up(self, request_ids: Sequence[str]) -> None:
        """A client's abort. What a lost generator had is answered already."""
        with contextlib.suppress(GeneratorFailed):
            self._running().abort(request_ids)

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

    def _lose(self, cause: TitanError) -> None:
        """The first cause is kept: what follows (a broken collective) follows from it."""
        if self._lost is None:
            self._lost = cause
            self._loss.set()
        self._desk.answer([], [(request_id, self._lost) for request_id in self._desk.live()])

    def _completed(self, completions: list[Completion]) -> None:
        """From the engine thread."""
        assert self._event_loop is not None
        named = [replace(completion, generator=self._name) for completion in completions]
        self._event_loop.call_soon_threadsafe(self._desk.answer, named)

    def _sampled(self, pieces: list[Piece]) -> None:
        """From the engine thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._desk.hand_out, pieces)

    def _failed(self, error: BaseException) -> None:
        """From the engine thread, once: the loop is over."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._on_failed, error)

    def _on_failed(self, error: BaseException) -> None:
        _log.error("the engine loop of %s rank %d failed", self._name, self._rank, exc_info=error)
        cause = GeneratorFailed(f"{self._name} rank {self._rank}: {type(error).__name__}: {error}")
        self._lose(cause)
        if self._rank == 0:
            for follower in self._followers:
                follower.send(str(cause))
        else:
            self._farewell = asyncio.get_running_loop().create_task(
                self._tell_rank0(f"{type(error).__name__}: {error}")
            )

    async def _leave_when_told(self, receiver: Any) -> None:
        try:
            reason = await receiver.recv()
        except Exception as error:
            _log.error("%s rank %d would not hear of rank 0's failure", self._name, self._rank, exc_info=error)
            return
        if self._farewell is None:  # else it is just telling rank 0 of a failure of its own, and leaves after that
            _log.error("%s rank %d leaves: %s", self._name, self._rank, reason)
            logging.shutdown()
            os._exit(FATAL_EXIT_CODE)

    async def _tell_rank0(self, reason: str) -> None:
        try:
            assert self._rank0 is not None
            await self._rank0.call(PEER_REPORT_SECONDS, Generator.peer_failed, self._rank, reason)
        except TitanError as error:
            _log.error("rank 0 could not be told: %s", error)
        finally:
            # A rank that lost lockstep must not stay in any collective; its exit breaks rank 0's at once.
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
