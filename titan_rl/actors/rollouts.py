"""`RolloutWorkers`: all rollout workers and their stores as one object. `RolloutWorkerClient`: one of them.

    run_group(request) ──▶ the living worker with the fewest groups ──▶ GroupReport
    release of a batch ──▶ the stores that hold it, by id

Every requested group is reported exactly once: finished, with the error that ended it, or with `ActorGone` when it was
lost with what played it. It is played again then, unless it is to blame (`Suspects`). If the caller was cancelled
before the report came, the samples are released here.

    a group is lost SUSPECTED times in a row with its worker ─▶ a suspect: no other suspect is played at its worker
    a suspect is lost with its worker, or engines die under a group,
        and others have ended since its last loss, or its worker plays no others ─▶ counts
    a group has lost what counts GUILTY times ─▶ it is to blame

A loss by itself says nothing: hosts are preempted, processes run out of memory, somebody kills one. So a group is
played again as often as it takes. It is to blame only if what plays it dies with it again and again, and lives while
others are played. A group that reaches its end is suspected of nothing any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from titan_rl.actors.rollout_worker import RolloutWorker
from titan_rl.config import RunConfig
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import HeldReport, SharedMemorySource, channel_of
from titan_rl.errors import ActorFailed, ActorGone, GatewayGone, InfrastructureFailed, TitanError
from titan_rl.isolation.wire import TaskInfo
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.rollout.report import GroupReport, unplayed
from titan_rl.rpc.connection import RemoteMethod
from titan_rl.rpc.mesh_client import MeshClient
from titan_rl.types import GroupKey, GroupRequest, Purpose

T = TypeVar("T")

SUSPECTED = 3
"""Losses in a row. Fewer would play many groups one after the other for nothing, where a host is lost."""

GUILTY = 4
"""More would cost a worker each; fewer might be chance."""

_log = logging.getLogger(__name__)


class RolloutWorkerClient(MeshClient):
    """One worker as the controller sees it. A worker that is lost takes the samples of its store along."""

    actor_class = RolloutWorker

    def __init__(self, name: str, rollouts: RolloutWorkers) -> None:
        super().__init__(name, start_seconds=rollouts.start_seconds)
        self.store = ""
        """Name of its store; empty while there is no worker that plays."""
        self.playing: dict[GroupKey, asyncio.Task[GroupReport]] = {}
        self.begun = 0
        """Groups that it was given."""
        self.one_suspect = asyncio.Lock()
        """Held while a group that may end the worker is played."""
        self._rollouts = rollouts
        self._releases: set[asyncio.Task[Any]] = set()

    async def run_group(self, request: GroupRequest) -> GroupReport:
        call = self.ranks[0].call(None, RolloutWorker.run_group, request)
        play = self.playing[request.key] = asyncio.get_running_loop().create_task(call)
        store = self.store
        try:
            report = await asyncio.shield(play)
        except asyncio.CancelledError:
            if play.cancelled():
                raise ActorFailed(f"{request}: {self.name} was closed") from None
            play.add_done_callback(self._disown)
            raise
        finally:
            del self.playing[request.key]
        if store != self.store:
            raise ActorGone(f"{request}: {self.name} was lost with its samples")
        self.has_worked = True
        return report

    async def close(self) -> None:
        """End the worker's child processes and remove its store."""
        for play in self.playing.values():
            play.cancel()
        self.store = ""  # from now on its samples are not lost, but over
        await self.ranks[0].call(self.start_seconds, RolloutWorker.close)

    async def _set_up(self, peers: dict[str, Any]) -> list[int]:
        pid, self.store, info = await self.ranks[0].call(self.start_seconds, RolloutWorker.setup, **peers)
        self._rollouts.ready(info)
        return [pid]

    def _on_lost(self, reason: str) -> None:
        if self.store:
            self.files_left, self.store = channel_of(self.store), ""
            self._rollouts.on_lost(f"{self.name} is gone with the samples that it held: {reason}")

    def _disown(self, play: asyncio.Task[GroupReport]) -> None:
        """Release the samples of a report that nobody waits for any more."""
        if not play.cancelled() and play.exception() is None and len(play.result().samples):
            release = asyncio.get_running_loop().create_task(self._rollouts.release(play.result().samples))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)


@dataclass(slots=True)
class _Losses:
    with_worker: int = 0
    counted: int = 0
    ended_before: int = 0
    """Groups that had ended at its last loss."""


class Suspects:
    """The groups that were lost, by any name. Pure."""

    def __init__(self) -> None:
        self._ended = 0
        self._losses: dict[Hashable, _Losses] = {}

    def __contains__(self, group: Hashable) -> bool:
        return group in self._losses and self._losses[group].with_worker >= SUSPECTED

    def lost(self, group: Hashable, *, with_worker: bool, alone: bool) -> bool:
        """A group was lost. Returns whether it is to blame. `with_worker`: its worker is lost too. `alone`: its worker
        played no other group meanwhile."""
        suspect = group in self
        losses = self._losses.setdefault(group, _Losses(ended_before=self._ended))
        losses.counted += (alone or self._ended > losses.ended_before) and (suspect or not with_worker)
        losses.with_worker += with_worker
        losses.ended_before = self._ended
        if losses.counted < GUILTY:
            return False
        del self._losses[group]
        return True

    def ended(self, group: Hashable) -> None:
        self._ended += 1
        self._losses.pop(group, None)


class RolloutWorkers:
    """Belongs to one event loop. A group is played by a worker that lives; if none does, it waits for one."""

    def __init__(self, config: RunConfig) -> None:
        self.start_seconds, self.step_seconds = config.placement.start_seconds, config.placement.step_seconds
        self.workers = [RolloutWorkerClient(f"rollout{number}", self) for number in range(config.rollout.workers)]
        """Each is given its actor by `replace`."""
        self.held_out = 0
        """Number of held-out prompts, at most what the config asks for; known once a worker is set up."""
        self.on_lost: Callable[[str], None] = lambda reason: None
        """Called when samples are lost, because their worker is; `holds` says which."""
        self._worker_ready = asyncio.Event()
        self._suspects = Suspects()

    @property
    def stores(self) -> dict[str, Any]:
        """Worker handle by the name of the worker's store."""
        return {worker.store: worker.actor for worker in self._living}

    def holds(self, batch: SampleBatch) -> bool:
        """Whether the workers that hold these samples live."""
        return batch.stored_ids.keys() <= self.stores.keys()

    def ready(self, info: TaskInfo) -> None:
        self.held_out = info.held_out
        self._worker_ready.set()

    async def run_group(self, request: GroupRequest) -> GroupReport:
        """Play one group. The caller owns the samples of the returned report. The report of a group that ends what
        plays it says so, and no rollout was played. After any error none of its samples are stored. Raises ActorGone:
        what played it is gone; play it again, under the next attempt number. GroupStopped: `stop_groups` ended it."""
        if any(request.key in worker.playing for worker in self.workers):
            raise ValueError(f"{request} is being played already")
        group = (request.purpose, request.group_id)
        try:
            async with self._player(group) as worker:
                store, alone = worker.store, not worker.playing
                worker.begun = begun = worker.begun + 1
                report = await worker.run_group(request)
        except ActorGone as error:
            alone = alone and begun == worker.begun
            with_worker = worker.store != store
            if isinstance(error, GatewayGone) or not self._suspects.lost(group, with_worker=with_worker, alone=alone):
                raise
            why = f"{request} ends what plays it, {GUILTY} times in a row, and others do not: {error}"
            return unplayed(request, InfrastructureFailed(why))
        self._suspects.ended(group)
        return report

    async def play(self, request: GroupRequest) -> GroupReport:
        """As `run_group`, but a group that is lost is played again here."""
        while True:
            try:
                return await self.run_group(request)
            except ActorGone as error:
                _log.info("%s is played again: %s", request, error)
                request = dataclasses.replace(request, attempt=request.attempt + 1)

    async def run_groups(self, requests: Sequence[GroupRequest]) -> list[GroupReport]:
        """`play` these groups; returns reports in the order of the requests. If one fails, the others are released."""
        plays = [asyncio.get_running_loop().create_task(self.play(request)) for request in requests]
        try:
            return await asyncio.gather(*plays)
        except BaseException:
            for play in plays:
                play.cancel()
            for outcome in await asyncio.gather(*plays, return_exceptions=True):
                if isinstance(outcome, GroupReport):
                    await self.release(outcome.samples)
            raise

    async def stop_groups(self) -> None:
        """Stop all running groups: each `run_group` raises `GroupStopped`, or returns if its group had ended."""
        await self._all(RolloutWorker.stop_groups, dict.fromkeys(self.stores, ()))

    async def describe(self, chosen: Sequence[RolloutRecord], reports: Sequence[GroupReport]) -> list[RolloutRecord]:
        """The chosen rollouts, all of training or all of one evaluation, with their texts and tokens, in their order,
        as far as their workers know: of training until the samples are released, of an evaluation until the first call.
        Never raises a TitanError. `reports`: of their groups."""
        if not chosen:
            return []
        purpose = chosen[0].purpose
        wanted: dict[str, list[tuple[int, int, RolloutRecord]]] = {}
        if purpose is Purpose.EVALUATE:  # whichever worker has played it
            wanted = {worker.store: [(each.group, 1, each) for each in chosen] for worker in self._living}
        else:
            groups = {report.group_id: report for report in reports}
            for each in chosen:
                group = groups[each.group]
                ref = group.samples.refs[0]  # any of its samples
                wanted.setdefault(ref.store, []).append((ref.sample_id, len(group.rollouts), each))
        try:
            asked = {store: (purpose, tuple(its)) for store, its in wanted.items()}
            known = await self._all(RolloutWorker.describe, asked)
        except TitanError as error:
            _log.warning("rollouts cannot be shown: %s", error)
            return []
        found = {(each.group, each.sample): each for its in known for each in its}
        names = [(each.group, each.sample) for each in chosen]
        return [found[name] for name in names if name in found]

    async def release(self, batch: SampleBatch) -> list[HeldReport]:
        """Free a batch's samples, once; those of a worker that is gone are free. Returns what the stores still hold."""
        return await self._all(RolloutWorker.release, {store: (ids,) for store, ids in batch.stored_ids.items()})

    async def take_over(self, reports: Iterable[GroupReport]) -> list[GroupReport]:
        """Store the samples of reported groups that lie in files. The caller owns those of the returned reports. Raises
        SampleError: one is missing or damaged."""

        async def store(number: int, report: GroupReport) -> GroupReport:
            # here, because a worker's host need not see the files
            read = SampleBatch.of(await asyncio.to_thread(SharedMemorySource().fetch, report.samples))
            while True:
                living = await self._alive()
                with suppress(ActorGone):
                    worker = living[number % len(living)].ranks[0]
                    samples = await worker.call(self.step_seconds, RolloutWorker.take_over, read)
                    return dataclasses.replace(report, samples=samples)

        return await asyncio.gather(*itertools.starmap(store, enumerate(reports)))

    async def held(self) -> list[HeldReport]:
        return await self._all(RolloutWorker.release, dict.fromkeys(self.stores, ((),)))

    @property
    def _living(self) -> list[RolloutWorkerClient]:
        return [worker for worker in self.workers if worker.store]

    @asynccontextmanager
    async def _player(self, group: tuple[Purpose, int]) -> AsyncIterator[RolloutWorkerClient]:
        """The living worker with the fewest groups, for a suspect one at which no other suspect is played."""
        while True:
            worker = min(await self._alive(), key=lambda worker: len(worker.playing))
            if group not in self._suspects:
                yield worker
                return
            async with worker.one_suspect:
                worker.has_worked = True  # if it dies now, that says nothing about its start
                if worker.store:  # it did not die meanwhile
                    yield worker
                    return

    async def _alive(self) -> list[RolloutWorkerClient]:
        """The workers that live; if there is none, waits for one."""
        while not (living := self._living):
            self._worker_ready.clear()
            await self._worker_ready.wait()
        return living

    async def _all(self, endpoint: RemoteMethod[..., T], arguments: Mapping[str, tuple[Any, ...]]) -> list[T]:
        """The answers of the workers with these stores, called with these arguments, that do not die meanwhile."""
        called = ((worker.ranks[0], arguments[worker.store]) for worker in self._living if worker.store in arguments)
        calls = (worker.call(self.step_seconds, endpoint, *its) for worker, its in called)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ActorGone):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
