"""`RolloutWorker`: one process that plays groups of rollouts and stores their samples until they have been trained.

A worker gets completions from the router and runs all user code in a child process. A group stays on one worker from
its first request to its last sample. Every requested group is answered once: with its report, or with the error that
ended it. Only a reported group has samples in the store.

What was played is kept for whoever records it: of training until its samples are released, of evaluation until the
rollouts that are shown were asked for. So it is bounded as the samples are, and by `evaluation.prompts`.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from titan_rl.actors.gateway import RolloutGatewayClient
from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.sample_stores import StoreKeeper
from titan_rl.config import RunConfig
from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef
from titan_rl.data_plane.store import HeldReport, SampleStore
from titan_rl.errors import ActorGone, GroupStopped, RequestLost, SharedMemoryFull
from titan_rl.isolation.wire import TaskInfo
from titan_rl.metrics.activity import activity
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.metrics.timeline import timeline
from titan_rl.processes import owner_pid
from titan_rl.rollout.group_runner import GroupRunner
from titan_rl.rollout.report import GroupReport, GroupResult, report_of
from titan_rl.rpc.connection import endpoint
from titan_rl.types import Completion, GenerationRequest, GroupRequest, Purpose

_log = logging.getLogger(__name__)

ROOM_SECONDS = 120.0
"""How long a finished group waits for room in the host's shared memory; then the run ends."""
_ROOM_PAUSE = 1.0


class RolloutWorker(StoreKeeper):
    """The endpoints are the calls of `RolloutWorkers`, which documents them."""

    def __init__(self, config: RunConfig, *, mesh: str, model_path: str) -> None:
        max_bytes = config.data_plane.store_mib << 20
        super().__init__(SampleStore(f"{mesh}.{os.getpid()}", owner_pid=owner_pid(), max_bytes=max_bytes))
        self._config = config
        self._runner = GroupRunner(config, model_path=model_path)
        self._router = RouterClient(seconds=config.placement.start_seconds, who=mesh, is_replaced=True)
        self._gateway: RolloutGatewayClient | None = None
        self._playing: set[asyncio.Task[GroupResult]] = set()
        self._trained: dict[int, GroupResult] = {}  # by id of each stored sample
        self._evaluated: dict[int, GroupResult] = {}  # by group id

    @endpoint
    async def setup(self, router: Any, gateway: Any = None) -> tuple[int, str, TaskInfo]:
        """Start the process that runs user code. Returns this process's id, its store's name, and the `TaskInfo`."""
        self._router.replace([router])
        timeline.follow(self._waits_for)
        if gateway is not None:
            self._gateway = RolloutGatewayClient(gateway, is_replaced=True)
        return os.getpid(), self._store.name, await self._runner.start(self._gateway)

    @endpoint
    async def set_peers(self, router: Any = None, gateway: Any = None) -> None:
        """None: the one before is still there."""
        if router is not None:
            self._router.replace([router])
        if gateway is not None and self._gateway is not None:
            self._gateway.replace([gateway])

    @endpoint
    async def run_group(self, request: GroupRequest) -> GroupReport:
        """It starts before the first await, so that a `stop_groups` right behind this call stops it."""
        task = asyncio.get_running_loop().create_task(self._runner.run_group(request, self._generate))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)
        with activity("rollout", group=request.group_id, attempt=request.attempt, purpose=request.purpose):
            try:
                return await self._report(request, await task)
            except asyncio.CancelledError:
                raise GroupStopped(f"{request} was stopped") from None

    @endpoint
    async def stop_groups(self) -> None:
        for task in self._playing:
            task.cancel()

    @endpoint
    async def describe(
        self, purpose: Purpose, wanted: tuple[tuple[int, int, RolloutRecord], ...]
    ) -> list[RolloutRecord]:
        """Those that are known here. They are looked up before the first await, so that a `release` right behind this
        call comes after it. `wanted`: the id of any sample of the group, or, of an evaluation, the group's id; the
        rollouts of the group; and the rollout in numbers."""
        evaluated = purpose is Purpose.EVALUATE
        known = self._evaluated if evaluated else self._trained
        found = [(known[key], count, rollout) for key, count, rollout in wanted if key in known]
        if evaluated:
            self._evaluated.clear()
        decode = self._runner.renderer.decode
        described = (result.describe(rollout, decode, count=count) for result, count, rollout in found)
        return await asyncio.to_thread(list, described)

    @endpoint
    async def release(self, ids: tuple[int, ...]) -> HeldReport:
        self._store.release(ids)
        for sample_id in ids:
            self._trained.pop(sample_id, None)
        return self._store.held()

    @endpoint
    async def take_over(self, samples: SampleBatch) -> SampleBatch:
        """Of one group, which the batch takes along."""
        assert samples.samples is not None
        refs = self._store.put(samples.samples)
        self._keep(GroupResult(samples=samples.samples), refs)
        return SampleBatch.of(refs)

    @endpoint
    async def close(self) -> None:
        await self._runner.close()
        await self._router.disconnect()
        if (held := self._store.close()).samples:
            _log.info("given up at the end: %s", held)

    def _waits_for(self) -> str:
        """For whom all that is played here waits."""
        if self._router.waits:
            return "generators"
        if self._runner.pool.busy:
            return "environment"
        return "programs" if self._playing else "slots"

    async def _generate(self, asked: GenerationRequest) -> Completion:
        try:
            return await self._router.generate(asked)
        except RequestLost as error:  # a fault of engines has no reward: the group is played again
            raise ActorGone(str(error)) from error

    async def _report(self, request: GroupRequest, result: GroupResult) -> GroupReport:
        """Store and report a finished group's samples: both or neither. `stop_groups` no longer reaches it."""
        for rollout in result.rollouts:
            if rollout.error:
                _log.warning("%s sample %d: %s: %s", request, rollout.sample, rollout.failure, rollout.error)
        until = time.monotonic() + ROOM_SECONDS
        while True:
            try:
                refs = self._store.put(result.samples)
                break
            except SharedMemoryFull as error:
                if time.monotonic() > until:
                    raise
                _log.warning("%s waits for room: %s", request, error)
            await asyncio.sleep(_ROOM_PAUSE)
        if request.purpose is Purpose.EVALUATE:  # it has no samples
            self._evaluated[request.group_id] = result
        self._keep(result, refs)
        return report_of(request, result, refs)

    def _keep(self, result: GroupResult, refs: Sequence[SampleRef]) -> None:
        if self._config.logging.rollouts:
            self._trained.update((ref.sample_id, result) for ref in refs)
