"""`RolloutWorker`: plays groups of rollouts and stores their samples until they have been trained.

It gets completions from the router and runs all user code in a child process. A group stays on one worker from its
first request to its last sample. Every requested group is reported exactly once: finished, or with the error that
ended it. Only a reported group has samples in the store.
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
"""From this many bytes, a group's samples are stored by a thread. Below it, the hand-over costs more than the copy."""


class RolloutWorker(ConnectedActor):
    """Endpoints: `setup`, `play`, `stop_playing`, `release`, `held`, `expose`, `withdraw`, `close`."""

    def __init__(self, config: RunConfig, *, model_path: str, imports: tuple[str, ...], owner_pid: int) -> None:
        """
        Args:
            owner_pid: process that the names of shared-memory files carry; once it is dead, a later run removes them.
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
        """Play one group. It starts before the first await, so that a `stop_playing` right behind this call stops it.

        Raises:
            GroupStopped: `stop_playing` ended it.
            TitanError: another error ended it. None of its samples are stored.
        """
        task = self._begin(request)
        try:
            return await self._report(request, await task)
        except asyncio.CancelledError:
            raise GroupStopped(f"{request} was stopped") from None

    @served
    async def stop_playing(self) -> None:
        """Stop every running group. Each is reported as stopped, unless its last rollout had already ended."""
        for task in self._playing:
            task.cancel()

    @served
    async def release(self, ids: tuple[int, ...]) -> HeldReport:
        """Free samples for their owner. Returns what the store still holds."""
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
            A handle on a buffer with the samples' encodings one after the other, and a token for `withdraw`.
        """
        exposed = await asyncio.to_thread(lambda: Exposed(self._store.read(ids)))
        self._exposed[exposed.token] = exposed
        return exposed.handle, exposed.token

    @served
    async def withdraw(self, token: int) -> None:
        """The reader is done with an exposed buffer."""
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
        """Store and report a finished group's samples: both or neither. `stop_playing` no longer reaches it."""
        for rollout in result.rollouts:
            if rollout.error:
                _log.warning("%s sample %d: %s", request, rollout.sample, rollout.error)
        if sum(encoded_size(len(sample.token_ids)) for sample in result.samples) < _AWAY_FROM_LOOP:
            return self._stored(request, result)
        return await asyncio.to_thread(self._stored, request, result)

    def _stored(self, request: GroupRequest, result: GroupResult) -> GroupReport:
        refs = self._store.put(result.samples)
        return report_of(request, result, refs)
