"""`Generator`: one tensor-parallel rank of a generator mesh, and `GeneratorClient`, the handle of all its ranks.

All engine work happens in the loop's one thread. This actor only moves messages, so it answers within milliseconds
however long an engine step takes. Rank 0 takes requests and pulls; the other ranks follow its broadcast decisions.

A generator dies as a whole, with one cause. A rank whose engine loop fails ends its process. A follower first tells
rank 0 the cause, and rank 0 fails every request and call with it. The end of one process breaks the collectives of the
other ranks on CPU, so they fail and end too; on CUDA they may spin, and the controller, which sees the end, kills them.
A generator that is up therefore has all its ranks.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from titan_rl.actors.relay import WeightRelay
from titan_rl.errors import GeneratorFailed, TitanError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.metrics.timeline import Pulse
from titan_rl.rpc.connection import ConnectedActor, Connection, endpoint
from titan_rl.rpc.mesh_client import MeshClient
from titan_rl.rpc.requests import RequestServer
from titan_rl.types import Completion, GenerationRequest, PolicyVersion
from titan_rl.weights.manifest import Publication

FATAL_EXIT_CODE = 70
"""Exit code of a rank whose generator failed (EX_SOFTWARE)."""

FAREWELL_SECONDS = 1.0
"""How long a failed rank stays alive: Monarch sends in the background, and the router is to hear of the cause."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Generator(RequestServer):
    """One rank. Requests, `pull_model_state_dict`, `sleep` and `wake_up` go to rank 0; `EngineLoop` documents them."""

    def __init__(self, mesh: str, config: GeneratorConfig, *, model_path: str, device: str) -> None:
        super().__init__()
        self._name = mesh
        self._config = config
        self._model_path = Path(model_path)
        self._device = device
        self._rank = int(os.environ["RANK"])
        self._rank0: Connection | None = None
        self._relay: MeshClient | None = None
        self._loop: EngineLoop | None = None
        self._failure: TitanError | None = None  # why this generator can serve no more
        self._failed = asyncio.Event()  # set with it
        self._exiting: asyncio.Task[None] | None = None  # kept, so that the task is not collected

    @endpoint
    async def setup(self, rank0: Any, relay: Any = None) -> int:
        """Build the engine and start its loop; returns this process's id. Nothing is served before the first verified
        pull. A follower reports its failure to rank 0. `relay`: of this host; None: publications are here without."""
        self._rank0 = Connection(rank0, what=f"{self._name}.{{}} of rank 0")
        await Generator.set_peers.answer(self, relay)
        tell = asyncio.get_running_loop().call_soon_threadsafe  # what the engine thread has to say
        self._loop = EngineLoop(
            self._config,
            rank=self._rank,
            model_path=self._model_path,
            device=self._device,
            on_completions=lambda completions: tell(self._completed, completions),
            on_pieces=lambda pieces: tell(self.send_pieces, pieces),
            on_fatal=lambda error: tell(self._loop_ended, error),
        )
        started = time.monotonic()
        await self._outcome(self._loop.start())
        _log.info("%s rank %d is ready after %.1f s", self._name, self._rank, time.monotonic() - started)
        return os.getpid()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        try:
            verdicts: list[TitanError | None] = list(self._running().submit(requests))
        except GeneratorFailed as error:
            verdicts = [self._named(error)] * len(requests)
        self.answer([], [(r.request_id, error) for r, error in zip(requests, verdicts, strict=True) if error])

    def stop_requests(self, request_ids: Sequence[str]) -> None:
        with contextlib.suppress(GeneratorFailed):  # a failed generator has already answered its requests
            self._running().abort(request_ids)

    @endpoint
    async def pull_model_state_dict(self, publication: Publication) -> PolicyVersion:
        """The weights may be older than those before: groups of an exact version are played again."""
        return await self._pulled(publication, EngineLoop.pull)

    @endpoint
    async def sleep(self) -> int:
        return await self._outcome(self._running().sleep())

    @endpoint
    async def wake_up(self, publication: Publication) -> PolicyVersion:
        return await self._pulled(publication, EngineLoop.wake_up)

    @endpoint
    async def set_peers(self, relay: Any) -> None:
        if self._relay is not None:
            self._relay.replace([relay])
        elif relay is not None:
            self._relay = MeshClient("the relay of this host", [relay])

    @endpoint
    async def pulse(self) -> Pulse:
        alive = await ConnectedActor.pulse.answer(self)
        return alive if self._loop is None else alive._replace(progress=self._loop.pulse())

    @endpoint
    async def fail(self, reason: str) -> None:
        """End this process, and with it the generator: a follower is about to end, or the engine thread is stuck."""
        self._fail(GeneratorFailed(reason))

    @endpoint
    async def close(self) -> None:
        if self._loop is not None and self._failure is None:
            await self._outcome(self._loop.close())
        self.fail_all(GeneratorFailed(f"{self._name} was closed"))

    async def _pulled(
        self, publication: Publication, pull: Callable[[EngineLoop, Publication], Future[PolicyVersion]]
    ) -> PolicyVersion:
        """Bring the weights to this host while the engine goes on, then pull them. A relay that is gone is replaced, or
        ends the run; the router bounds the wait."""
        self._running()
        if (relay := self._relay) is not None:
            await relay.retry_on_replacement(lambda: relay.ranks[0].call(None, WeightRelay.bring, publication))
        version = await self._outcome(pull(self._running(), publication))
        _log.info("serving %s", version)
        return version

    def _running(self) -> EngineLoop:
        if self._failure is not None:
            raise self._failure
        if self._loop is None:
            raise GeneratorFailed(f"{self._name} rank {self._rank} was called before setup")
        return self._loop

    async def _outcome(self, future: Future[T]) -> T:
        """The loop's answer. Raises the cause if the generator fails first. A caller that goes away must not cancel the
        future, because the engine thread will still resolve it."""
        answer = asyncio.wrap_future(future)
        failed = asyncio.get_running_loop().create_task(self._failed.wait())
        first: set[asyncio.Future[Any]] = {answer, failed}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
            # Mark a late answer's exception as retrieved: nobody else will.
            answer.add_done_callback(lambda late: late.exception())
        if self._failure is not None:
            raise self._failure
        try:
            return answer.result()
        except GeneratorFailed as error:
            raise self._named(error) from error

    def _named(self, error: GeneratorFailed) -> TitanError:
        """The loop's error with this generator's name, or the cause if the generator failed as a whole."""
        if self._failure is not None:
            return self._failure
        return type(error)(f"{self._name}: {error}")

    def _completed(self, completions: list[Completion]) -> None:
        self.answer([replace(completion, generator=self._name) for completion in completions])

    def _loop_ended(self, error: BaseException) -> None:
        _log.error("the engine loop of %s rank %d failed", self._name, self._rank, exc_info=error)
        self._fail(GeneratorFailed(f"{self._name} rank {self._rank} failed: {type(error).__name__}: {error}"))

    def _fail(self, cause: GeneratorFailed) -> None:
        """Fail all open requests and calls, then end the process. The first cause counts: later ones follow from it."""
        if self._failure is None:
            self._failure = cause
            self._failed.set()
            self._exiting = asyncio.get_running_loop().create_task(self._report_and_exit(cause))
            self.fail_all(cause)

    async def _report_and_exit(self, cause: GeneratorFailed) -> None:
        """A failed rank must leave every collective; its exit breaks those of the other ranks at once."""
        try:
            if self._rank == 0:
                await asyncio.sleep(FAREWELL_SECONDS)
            elif self._rank0 is not None:
                await self._rank0.call(FAREWELL_SECONDS, Generator.fail, str(cause))
        except TitanError as error:
            _log.error("rank 0 could not be told: %s", error)
        finally:
            _log.error("%s rank %d ends: %s", self._name, self._rank, cause)
            logging.shutdown()
            os._exit(FATAL_EXIT_CODE)


class GeneratorClient(MeshClient):
    actor_class = Generator

    async def _set_up(self, peers: dict[str, Any]) -> list[int]:
        return await self.call_all(self.start_seconds, Generator.setup, self.actor, **peers)
