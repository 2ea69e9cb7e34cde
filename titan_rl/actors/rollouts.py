"""`RolloutWorker` plays groups of rollouts and stores their samples until they have been trained. `Rollouts` is all
workers and their stores as one object.

    run_group(request) ──▶ the worker with the fewest groups ──▶ GroupReport
    release of a batch ──▶ the stores that hold it, by id

A worker gets completions from the router and runs all user code in a child process. A group stays on one worker from
its first request to its last sample. Every requested group is reported exactly once: finished, with the error that
ended it, or with `ActorFailed` when its worker is gone. Only a reported group has samples in the store. If the caller
was cancelled before the report came, the samples are released here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from monarch.actor import current_rank

from titan_rl.actors.connection import Connection, ServedMethod, served
from titan_rl.actors.gateway import GatewayClient
from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.sample_stores import StoreKeeper
from titan_rl.config import RunConfig
from titan_rl.data_plane.layout import encoded_size
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import HeldReport, SampleStore, SharedMemorySource
from titan_rl.errors import ActorFailed, GroupStopped
from titan_rl.rollout.group_runner import GroupRunner
from titan_rl.rollout.report import GroupReport, GroupResult, report_of
from titan_rl.sandbox.wire import TaskInfo
from titan_rl.types import Completion, GenerationRequest, GroupKey, GroupRequest

T = TypeVar("T")

_log = logging.getLogger(__name__)

_AWAY_FROM_LOOP = 1 << 20
"""From this many bytes, a group's samples are stored by a thread. Below it, the hand-over costs more than the copy."""


class RolloutWorker(StoreKeeper):
    """Endpoints: `setup`, `run_group`, `stop_groups`, `release`, `take_over`, `held`, `expose`, `withdraw`, `close`."""

    def __init__(self, config: RunConfig, *, model_path: str, imports: tuple[str, ...], owner_pid: int) -> None:
        """
        Args:
            owner_pid: process that the names of shared-memory files carry; once it is dead, a later run removes them.
        """
        super().__init__(
            SampleStore(
                f"rollout{int(current_rank().rank)}.{os.getpid()}",
                owner_pid=owner_pid,
                max_bytes=config.data_plane.store_mib << 20,
            )
        )
        self._config = config
        self._runner = GroupRunner(
            config.environment,
            config.rollout,
            model_path=model_path,
            run_seed=config.seed,
            max_model_len=config.generator.max_model_len,
            held_out=config.evaluation.prompts,
            prompts=config.loop.prompts,
            imports=imports,
        )
        self._router: RouterClient | None = None
        self._playing: set[asyncio.Task[GroupResult]] = set()

    @served
    async def setup(self, router: Any, gateway: Any) -> tuple[int, str, TaskInfo]:
        """Start the child process that runs user code.

        Args:
            router: handle of the `GeneratorRouter`.
            gateway: handle of the `Gateway`; None: there is none.

        Returns:
            This process's id, the name of its store, and what the environment says about itself.
        """
        seconds = self._config.placement.step_seconds
        self._router = RouterClient(router, seconds=seconds)
        client = None if gateway is None else GatewayClient(gateway, seconds=seconds)
        return os.getpid(), self._store.name, await self._runner.start(client)

    @served
    async def run_group(self, request: GroupRequest) -> GroupReport:
        """Play one group. It starts before the first await, so that a `stop_groups` right behind this call stops it.

        Raises:
            GroupStopped: `stop_groups` ended it.
            TitanError: another error ended it. None of its samples are stored.
        """
        task = self._begin(request)
        try:
            return await self._report(request, await task)
        except asyncio.CancelledError:
            raise GroupStopped(f"{request} was stopped") from None

    @served
    async def stop_groups(self) -> None:
        """Stop every running group. Each is reported as stopped, unless its last rollout had already ended."""
        for task in self._playing:
            task.cancel()

    @served
    async def release(self, ids: tuple[int, ...]) -> HeldReport:
        """Free samples for their owner. Returns what the store still holds."""
        self._store.release(ids)
        return self._store.held()

    @served
    async def take_over(self, samples: SampleBatch) -> SampleBatch:
        """Store copies of samples that lie in files; returns references to them. The caller owns them."""

        def copy() -> SampleBatch:
            return SampleBatch.of(self._store.put(SharedMemorySource().fetch(samples)))

        return await asyncio.to_thread(copy)

    @served
    async def held(self) -> HeldReport:
        """What the store holds now."""
        return self._store.held()

    @served
    async def close(self) -> None:
        """End the child process; remove the store."""
        await self._runner.close()
        if self._router is not None:
            await self._router.disconnect()
        if (held := self._store.close()).samples:
            _log.info("given up at the end: %s", held)

    def _begin(self, request: GroupRequest) -> asyncio.Task[GroupResult]:
        if self._router is None:
            raise ActorFailed("the rollout worker was called before setup")
        router = self._router
        sessions: set[str] = set()

        async def generate(asked: GenerationRequest) -> Completion:
            if asked.session_id is not None:
                sessions.add(asked.session_id)
            return await router.generate(asked)

        task = asyncio.get_running_loop().create_task(self._runner.run_group(request, generate))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)
        task.add_done_callback(lambda _: router.end_sessions(sessions))
        return task

    async def _report(self, request: GroupRequest, result: GroupResult) -> GroupReport:
        """Store and report a finished group's samples: both or neither. `stop_groups` no longer reaches it."""
        for rollout in result.rollouts:
            if rollout.error:
                _log.warning("%s sample %d: %s", request, rollout.sample, rollout.error)
        if sum(encoded_size(len(sample.token_ids)) for sample in result.samples) < _AWAY_FROM_LOOP:
            return self._stored(request, result)
        return await asyncio.to_thread(self._stored, request, result)

    def _stored(self, request: GroupRequest, result: GroupResult) -> GroupReport:
        refs = self._store.put(result.samples)
        return report_of(request, result, refs)


class Rollouts:
    """All workers as one object. Belongs to one event loop."""

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

    async def run_group(self, request: GroupRequest) -> GroupReport:
        """Play one group. The caller owns the samples of the returned report.

        Raises:
            GroupStopped: `stop_groups` ended it.
            TitanError: another error ended it. None of its samples are stored.
        """
        if request.key in self._open:
            raise ValueError(f"{request} is being played already")
        worker = min(range(len(self._workers)), key=lambda worker: self._playing[worker])
        self._playing[worker] += 1
        call = self._workers[worker].call(None, RolloutWorker.run_group, request)
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

    async def run_groups(self, requests: Sequence[GroupRequest]) -> list[GroupReport]:
        """Play these groups; returns reports in the order of the requests. If one fails, the others are released."""
        plays = [asyncio.get_running_loop().create_task(self.run_group(request)) for request in requests]
        try:
            return await asyncio.gather(*plays)
        except BaseException:
            for play in plays:
                play.cancel()
            await asyncio.gather(*plays, return_exceptions=True)
            for play in plays:
                self._disown(play)
            raise

    async def stop_groups(self) -> None:
        """Stop all running groups: each `run_group` raises `GroupStopped`, or returns if its group had ended."""
        await self._all(RolloutWorker.stop_groups)

    async def release(self, batch: SampleBatch) -> list[HeldReport]:
        """Free a batch's samples; call it once per batch. Returns what their stores still hold."""
        return await asyncio.gather(
            *(
                self._workers[self._by_store[store]].call(self._step_seconds, RolloutWorker.release, ids)
                for store, ids in batch.stored_ids.items()
            )
        )

    async def take_over(self, reports: Iterable[GroupReport]) -> list[GroupReport]:
        """Store the samples of reported groups that lie in files. The caller owns those of the returned reports.

        Raises:
            SampleError: one is missing or damaged.
        """
        workers = itertools.cycle(self._workers)
        plan = [(report, next(workers)) for report in reports]
        calls = [worker.call(self._step_seconds, RolloutWorker.take_over, report.samples) for report, worker in plan]
        taken = await asyncio.gather(*calls)
        return [dataclasses.replace(report, samples=samples) for (report, _), samples in zip(plan, taken, strict=True)]

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

    async def _all(self, endpoint: ServedMethod[[], T]) -> list[T]:
        return await asyncio.gather(*(worker.call(self._step_seconds, endpoint) for worker in self._workers))
