"""`Rollouts`: all rollout workers and their stores as one object. `RolloutMesh`: one of them.

    run_group(request) ──▶ the living worker with the fewest groups ──▶ GroupReport
    release of a batch ──▶ the stores that hold it, by id

Every requested group is reported exactly once: finished, with the error that ended it, or with `ActorGone` when it was
lost with what played it. It is played again then, unless it is to blame (`Suspects`). If the caller was cancelled
before the report came, the samples are released here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from titan_rl.actors.connection import Connection, ServedMethod
from titan_rl.actors.lifeline import Lifeline
from titan_rl.actors.rollout_worker import RolloutWorker
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import HeldReport, SharedMemorySource, channel_of
from titan_rl.errors import ActorFailed, ActorGone, GatewayGone, TaskError, TitanError
from titan_rl.observability.timeline import Pulse
from titan_rl.policy.kept_tokens import SampleName
from titan_rl.rollout.record import Chosen, Record
from titan_rl.rollout.report import GroupReport, unplayed
from titan_rl.sandbox.wire import TaskInfo
from titan_rl.scheduling.suspects import GUILTY, Suspects
from titan_rl.types import GroupKey, GroupRequest, Purpose

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class RolloutMesh:
    """One worker, or the one that replaces it, as the controller sees it. A worker that is lost takes the samples of
    its store along."""

    def __init__(self, name: str, rollouts: Rollouts) -> None:
        """
        Args:
            name: of the worker's mesh.
            rollouts: told when the worker is lost, and when one is ready.
        """
        self.name = name
        self.actor: Any = None
        """Handle of the worker."""
        self.store = ""
        """Name of its store; empty while there is no worker that plays."""
        self.playing: dict[GroupKey, asyncio.Task[GroupReport]] = {}
        self.begun = 0
        """Groups that it was given."""
        self.one_suspect = asyncio.Lock()
        """Held while a group that may end the worker is played."""
        self.has_played = False
        """Whether this worker has played a group to its end: its start did not fail."""
        self._rollouts = rollouts
        self._asks: tuple[Any, Any] = (None, None)  # router and gateway
        self.channel = ""
        """Of the files that the worker before has left."""
        self._releases: set[asyncio.Task[Any]] = set()
        self._calls = Connection(None, what=f"{name}.{{}}", on_lost=self._gone)
        self._calls.lose("it was not started")

    def replace(self, actor: Any) -> None:
        """From now on this one worker is called. It plays once it is set up."""
        self._gone("it was replaced")
        self.actor, self.has_played = actor, False
        self._calls.replace(self.actor)

    def lose(self, reason: str) -> None:
        """The worker is gone or will be killed: its groups fail with `ActorGone`, and its samples are lost."""
        self._calls.lose(reason)
        self._gone(reason)

    async def setup(self, router: Any, gateway: Any = None) -> list[int]:
        """Start the worker; returns its process id. The files of the worker before it are removed, so that one must be
        dead.

        Args:
            router: handle of the `GeneratorRouter`.
            gateway: handle of the `Gateway`; None: there is none.
        """
        self._asks = (router, gateway)
        call = self._calls.call(self._rollouts.start_seconds, RolloutWorker.setup, router, gateway)
        pid, self.store, info = await call
        self._rollouts.ready(info)
        return [pid]

    async def use(self, router: Any, gateway: Any = None) -> None:
        """Let the worker ask these actors from now on; only those that it does not ask already are changed. A worker
        that is gone is told nothing: its successor hears of them in `setup`."""
        before, self._asks = self._asks, (router, gateway)
        changed = [new if new is not old else None for new, old in zip(self._asks, before, strict=True)]
        if any(changed):
            with suppress(ActorGone):
                await self._call(RolloutWorker.use, *changed)

    async def run_group(self, request: GroupRequest) -> GroupReport:
        """See `Rollouts.run_group`."""
        call = self._calls.call(None, RolloutWorker.run_group, request)
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
        self.has_played = True
        return report

    async def stop_groups(self) -> None:
        """See `Rollouts.stop_groups`."""
        await self._call(RolloutWorker.stop_groups)

    async def conversations(self, purpose: Purpose, wanted: tuple[tuple[int, int], ...]) -> dict[SampleName, Record]:
        """See `Rollouts.conversations`."""
        return await self._call(RolloutWorker.conversations, purpose, wanted)

    async def release(self, ids: tuple[int, ...]) -> HeldReport:
        """Free samples of the store; returns what it still holds."""
        return await self._call(RolloutWorker.release, ids)

    async def take_over(self, samples: SampleBatch) -> SampleBatch:
        """Store samples that lie in files; returns references to them."""
        return await self._call(RolloutWorker.take_over, samples)

    async def held(self) -> HeldReport:
        """What the store holds now."""
        return await self._call(RolloutWorker.held)

    async def pulse(self) -> list[Pulse]:
        """How often the worker has answered. The caller sets the time limit."""
        return [await self._calls.call(None, RolloutWorker.pulse)]

    async def close(self) -> None:
        """End the worker's child processes and remove its store. `remove_segments_of` removes the files of a worker
        that is gone."""
        for play in self.playing.values():
            play.cancel()
        self.store = ""  # from now on its samples are not lost, but over
        await self._calls.call(self._rollouts.start_seconds, RolloutWorker.close)

    def _gone(self, reason: str) -> None:
        if self.store:
            self.channel, self.store = channel_of(self.store), ""
            self._rollouts.on_lost(f"{self.name} is gone with the samples that it held: {reason}")

    def _disown(self, play: asyncio.Task[GroupReport]) -> None:
        """Release the samples of a report that nobody waits for any more."""
        if not play.cancelled() and play.exception() is None and len(play.result().samples):
            release = asyncio.get_running_loop().create_task(self._rollouts.release(play.result().samples))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def _call(self, endpoint: ServedMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._calls.call(self._rollouts.step_seconds, endpoint, *args, **kwargs)


class Rollouts:
    """All workers as one object. Belongs to one event loop. A group is played by a worker that lives; if none does, it
    waits for one."""

    def __init__(self, *, workers: int, start_seconds: float, step_seconds: float) -> None:
        """
        Args:
            start_seconds: how long a worker may take to start.
            step_seconds: how long any other call may take.
        """
        self.start_seconds = start_seconds
        self.step_seconds = step_seconds
        self.workers = [RolloutMesh(f"rollout{number}", self) for number in range(workers)]
        """Each is given its actor by `replace`."""
        self.held_out = 0
        """Number of held-out prompts, at most what the config asks for; known once a worker is set up."""
        self.on_lost: Callable[[str], None] = lambda reason: None
        """Called when samples are lost, because their worker is; `holds` says which."""
        self._lifeline = Lifeline()
        self._suspects = Suspects()

    @property
    def stores(self) -> dict[str, Any]:
        """Worker handle by the name of the worker's store."""
        return {worker.store: worker.actor for worker in self._living}

    def holds(self, batch: SampleBatch) -> bool:
        """Whether the workers that hold these samples live."""
        return batch.stored_ids.keys() <= self.stores.keys()

    def ready(self, info: TaskInfo) -> None:
        """A worker was set up."""
        self.held_out = info.held_out
        self._lifeline.replaced()

    async def run_group(self, request: GroupRequest) -> GroupReport:
        """Play one group. The caller owns the samples of the returned report. The report of a group that ends what
        plays it says so, and no rollout was played.

        Raises:
            ActorGone: what played it is gone; play it again, under the next attempt number.
            GroupStopped: `stop_groups` ended it.
            TitanError: another error ended it. None of its samples are stored.
        """
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
            return unplayed(request, TaskError(why))
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
        await self._all(RolloutMesh.stop_groups, self._living)

    async def conversations(self, purpose: Purpose, chosen: Sequence[Chosen]) -> dict[SampleName, Record]:
        """What was said in these rollouts, by name, as far as their workers know: of training until the samples are
        released, of an evaluation until the first call. Never raises a TitanError."""
        if purpose is Purpose.EVALUATE:
            wanted = {worker.store: [each.name for each in chosen] for worker in self._living}
        else:
            wanted = {}
            for each in chosen:
                ref = each.report.samples.refs[0]  # any sample of its group
                wanted.setdefault(ref.store, []).append((ref.sample_id, each.rollout.sample))
        try:
            found = await self._all(
                lambda worker: worker.conversations(purpose, tuple(wanted[worker.store])),
                [worker for worker in self._living if worker.store in wanted],
            )
        except TitanError as error:
            _log.warning("rollouts cannot be shown: %s", error)
            return {}
        return {name: said for known in found for name, said in known.items()}

    async def release(self, batch: SampleBatch) -> list[HeldReport]:
        """Free a batch's samples; call it once per batch. Returns what their stores still hold. The samples of a
        worker that is gone are free already."""
        ids = batch.stored_ids
        return await self._all(
            lambda worker: worker.release(ids[worker.store]), [each for each in self._living if each.store in ids]
        )

    async def take_over(self, reports: Iterable[GroupReport]) -> list[GroupReport]:
        """Store the samples of reported groups that lie in files. The caller owns those of the returned reports.

        Raises:
            SampleError: one is missing or damaged.
        """

        async def take(number: int, report: GroupReport) -> GroupReport:
            # here, because a worker's host need not see the files
            read = SampleBatch.of(await asyncio.to_thread(SharedMemorySource().fetch, report.samples))
            while True:
                living = await self._alive()
                with suppress(ActorGone):
                    samples = await living[number % len(living)].take_over(read)
                    return dataclasses.replace(report, samples=samples)

        return await asyncio.gather(*itertools.starmap(take, enumerate(reports)))

    async def held(self) -> list[HeldReport]:
        """What every store holds now."""
        return await self._all(RolloutMesh.held, self._living)

    @property
    def _living(self) -> list[RolloutMesh]:
        return [worker for worker in self.workers if worker.store]

    @asynccontextmanager
    async def _player(self, group: tuple[Purpose, int]) -> AsyncIterator[RolloutMesh]:
        """The living worker with the fewest groups, for a suspect one at which no other suspect is played."""
        while True:
            worker = min(await self._alive(), key=lambda worker: len(worker.playing))
            if group not in self._suspects:
                yield worker
                return
            async with worker.one_suspect:
                worker.has_played = True  # if it dies now, that says nothing about its start
                if worker.store:  # it did not die meanwhile
                    yield worker
                    return

    async def _alive(self) -> list[RolloutMesh]:
        """The workers that live; if there is none, waits for one."""

        async def living() -> list[RolloutMesh]:
            if not self._living:
                raise ActorGone("no rollout worker lives")
            return self._living

        return await self._lifeline.again(living)

    async def _all(self, ask: Callable[[RolloutMesh], Awaitable[T]], workers: Iterable[RolloutMesh]) -> list[T]:
        """The answers of those that do not die meanwhile."""
        outcomes = await asyncio.gather(*map(ask, workers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ActorGone):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
