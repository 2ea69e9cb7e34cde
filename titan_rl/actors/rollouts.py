"""`Rollouts`: all rollout workers and their sample stores as one object.

    play(request) ──▶ the worker with the fewest groups ──▶ GroupReport
    release of a batch ──▶ the stores that hold it, by id

Every `play` ends: with a report, with the group's own error, or with `ActorFailed` when its worker is gone. If the
caller was cancelled before the report came, the samples are released here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from titan_rl.actors.calls import Endpoint
from titan_rl.actors.connection import Connection
from titan_rl.actors.rollout_worker import RolloutWorker
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import HeldReport
from titan_rl.errors import ActorFailed
from titan_rl.rollout.report import GroupReport
from titan_rl.types import GroupKey, GroupRequest

T = TypeVar("T")


class Rollouts:
    """Belongs to one event loop."""

    def __init__(self, mesh: Any, *, workers: int, start_seconds: float, step_seconds: float) -> None:
        self._actors = [mesh.slice(ranks=worker) for worker in range(workers)]
        self._workers = [
            Connection(actor, what=f"rollout worker {worker}.{{}}") for worker, actor in enumerate(self._actors)
        ]
        self._start_seconds = start_seconds
        self._step_seconds = step_seconds
        self._playing = [0] * workers
        self._open: dict[GroupKey, asyncio.Task[GroupReport]] = {}
        self._releases: set[asyncio.Task[Any]] = set()
        self._by_store: dict[str, int] = {}
        self.pids: list[int] = []
        """Process ids of the workers, known after `setup`."""
        self.held_out = 0
        """Number of held-out prompts, at most what the config asks for; known after `setup`."""

    @property
    def stores(self) -> dict[str, Any]:
        """Worker handle by the name of the worker's store; known after `setup`."""
        return {store: self._actors[worker] for store, worker in self._by_store.items()}

    async def setup(self, router: Any, gateway: Any = None) -> list[int]:
        """Start every worker; returns their process ids.

        Args:
            router: handle of the `GeneratorRouter`.
            gateway: handle of the `Gateway`; None: there is none.
        """
        answers = await asyncio.gather(
            *(worker.call(self._start_seconds, RolloutWorker.setup, router, gateway) for worker in self._workers)
        )
        self.pids = [pid for pid, _, _ in answers]
        self._by_store = {store: worker for worker, (_, store, _) in enumerate(answers)}
        self.held_out = answers[0][2].held_out
        return self.pids

    async def play(self, request: GroupRequest) -> GroupReport:
        """Play one group. The caller owns the samples of the returned report.

        Raises:
            GroupStopped: `stop_playing` ended it.
            TitanError: another error ended it. None of its samples are stored.
        """
        if request.key in self._open:
            raise ValueError(f"{request} is being played already")
        worker = min(range(len(self._workers)), key=lambda worker: self._playing[worker])
        self._playing[worker] += 1
        call = self._workers[worker].call(None, RolloutWorker.play, request)
        play = self._open[request.key] = asyncio.get_running_loop().create_task(call)
        try:
            return await asyncio.shield(play)
        except asyncio.CancelledError:
            if play.cancelled():
                raise ActorFailed(f"{request}: the rollout workers were closed") from None
            play.add_done_callback(self._disown)
            raise
        finally:
            self._playing[worker] -= 1
            del self._open[request.key]

    async def run(self, requests: Sequence[GroupRequest]) -> list[GroupReport]:
        """Play these groups; returns reports in the order of the requests. If one fails, the others are released."""
        plays = [asyncio.get_running_loop().create_task(self.play(request)) for request in requests]
        try:
            return await asyncio.gather(*plays)
        except BaseException:
            for play in plays:
                play.cancel()
            await asyncio.gather(*plays, return_exceptions=True)
            for play in plays:
                self._disown(play)
            raise

    async def stop_playing(self) -> None:
        """Stop all running groups: each `play` raises `GroupStopped`, or returns if its group had already ended."""
        await self._all(RolloutWorker.stop_playing)

    async def release(self, batch: SampleBatch) -> list[HeldReport]:
        """Free a batch's samples; call it once per batch. Returns what their stores still hold."""
        return await asyncio.gather(
            *(
                self._workers[self._by_store[store]].call(self._step_seconds, RolloutWorker.release, ids)
                for store, ids in batch.stored_ids.items()
            )
        )

    async def held(self) -> list[HeldReport]:
        """What every store holds now."""
        return await self._all(RolloutWorker.held)

    async def close(self) -> None:
        """End the workers' child processes and remove their stores. `remove_segments_of` removes the files of a worker
        that is gone.

        Raises:
            ActorFailed: a worker could not be closed; all others were.
        """
        for play in self._open.values():
            play.cancel()
        closing = [worker.call(self._start_seconds, RolloutWorker.close) for worker in self._workers]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _disown(self, play: asyncio.Task[GroupReport]) -> None:
        """Release the samples of a report that nobody waits for any more."""
        if not play.cancelled() and play.exception() is None and len(play.result().samples):
            release = asyncio.get_running_loop().create_task(self.release(play.result().samples))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def _all(self, endpoint: Endpoint[[], T]) -> list[T]:
        return await asyncio.gather(*(worker.call(self._step_seconds, endpoint) for worker in self._workers))
