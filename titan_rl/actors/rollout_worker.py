"""`RolloutWorker`: plays groups of rollouts and keeps their samples until they were trained.

It asks the router for completions and a child process for everything that is user code. A group lives on one worker
from its first request to its last sample. Every group it was asked for is reported exactly once: finished, or with
the error that ended it. Only a reported group has samples in the store.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from monarch.actor import current_rank

from titan_rl.actors.calls import served
from titan_rl.actors.connection import ConnectedActor
from titan_rl.actors.gateway import GatewayClient
from titan_rl.actors.requests import CompletionClient
from titan_rl.config import RunConfig
from titan_rl.data_plane.layout import encoded_size
from titan_rl.data_plane.rdma import Exposed
from titan_rl.data_plane.store import HeldReport, SampleStore
from titan_rl.errors import ActorFailed, GroupStopped
from titan_rl.rollout.group_runner import GroupRunner
from titan_rl.rollout.report import GroupReport, report_of
from titan_rl.rollout.result import GroupResult
from titan_rl.sandbox.wire import TaskInfo
from titan_rl.types import Completion, GenerationRequest, GroupRequest

_log = logging.getLogger(__name__)

_AWAY_FROM_LOOP = 1 << 20
"""Bytes of a group's samples from which they are stored by a thread: below, handing over costs more than copying."""


class RolloutWorker(ConnectedActor):
    """Endpoints: `setup`, `play`, `stop_playing`, `release`, `held`, `expose`, `withdraw`, `close`."""

    def __init__(self, config: RunConfig, *, model_path: str, imports: tuple[str, ...], owner_pid: int) -> None:
        """
        Args:
            owner_pid: process that names shared memory; its death lets others sweep it.
        """
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
        self._store = SampleStore(
            f"rollout{int(current_rank().rank)}.{os.getpid()}",
            owner_pid=owner_pid,
            max_bytes=config.data_plane.store_mib << 20,
        )
        self._exposed: dict[int, Exposed] = {}
        self._completions: CompletionClient | None = None
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
        self._completions = CompletionClient(router, name="router")
        sessions = None if gateway is None else GatewayClient(gateway, seconds=seconds)
        return os.getpid(), self._store.name, await self._runner.start(sessions)

    @served
    async def play(self, request: GroupRequest) -> GroupReport:
        """Play one group. It has begun before anything is awaited: a `stop_playing` that comes right behind finds it.

        Raises:
            GroupStopped: `stop_playing` ended it.
            TitanError: what ended it; none of its samples are stored.
        """
        task = self._begin(request)
        try:
            return await self._report(request, await task)
        except asyncio.CancelledError:
            raise GroupStopped(f"{request} was stopped") from None

    @served
    async def stop_playing(self) -> None:
        """End every group that is being played; each is reported as stopped, unless its last rollout was over."""
        for task in self._playing:
            task.cancel()

    @served
    async def release(self, ids: tuple[int, ...]) -> HeldReport:
        """The owner gives samples up. Returns what the store still holds."""
        self._store.release(ids)
        return self._store.held()

    @served
    async def held(self) -> HeldReport:
        """What the store holds now."""
        return self._store.held()

    @served
    async def expose(self, ids: tuple[int, ...]) -> tuple[Any, int]:
        """Make stored samples readable from other hosts until `withdraw`.

        Returns:
            A buffer handle, and its bytes: the samples' encodings one after the other.
        """
        exposed = await asyncio.to_thread(lambda: Exposed(self._store.read(ids)))
        self._exposed[exposed.token] = exposed
        return exposed.handle, exposed.token

    @served
    async def withdraw(self, token: int) -> None:
        """The reader is through."""
        await asyncio.to_thread(self._exposed.pop(token).drop)

    @served
    async def close(self) -> None:
        """End the child process; remove the store."""
        await self._runner.close()
        if self._completions is not None:
            await self._completions.leave()
        if (held := self._store.close()).samples:
            _log.info("given up at the end: %s", held)

    def _begin(self, request: GroupRequest) -> asyncio.Task[GroupResult]:
        if self._completions is None:
            raise ActorFailed("the rollout worker was called before setup")
        completions = self._completions
        sessions: set[str] = set()

        async def generate(asked: GenerationRequest) -> Completion:
            if asked.session_id is not None:
                sessions.add(asked.session_id)
            return await completions.generate(asked)

        task = asyncio.get_running_loop().create_task(self._runner.run_group(request, generate))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)
        task.add_done_callback(lambda _: completions.end_sessions(sessions))
        return task

    async def _report(self, request: GroupRequest, result: GroupResult) -> GroupReport:
        """Past the reach of `stop_playing`: the samples of a group that is over are stored and reported, or neither."""
        for rollout in result.rollouts:
            if rollout.error:
                _log.warning("%s sample %d: %s", request, rollout.sample, rollout.error)
        if sum(encoded_size(len(sample.token_ids)) for sample in result.samples) < _AWAY_FROM_LOOP:
            return self._stored(request, result)
        return await asyncio.to_thread(self._stored, request, result)

    def _stored(self, request: GroupRequest, result: GroupResult) -> GroupReport:
        refs = self._store.put(result.samples)
        return report_of(request, result, refs)
