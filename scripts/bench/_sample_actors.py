"""Actors of data_plane.py: a store in the process that made its samples, and a trainer rank that wants them."""

from __future__ import annotations

import asyncio
import contextvars
import time
from typing import Any

import numpy as np

from titan_rl.actors.connection import ConnectedActor, served
from titan_rl.actors.rollouts import RemoteStore
from titan_rl.data_plane.fetch import SampleSource, SharedMemorySource
from titan_rl.data_plane.layout import encoded_size
from titan_rl.data_plane.rdma import Exposed, RdmaSource
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleStore
from titan_rl.types import TrainingSample


class Store(ConnectedActor):
    """A rollout worker without rollouts."""

    def __init__(self, name: str, owner_pid: int) -> None:
        self._store = SampleStore(name, owner_pid=owner_pid)
        self._exposed: dict[int, Exposed] = {}

    @served
    async def fill(self, tokens: int, nbytes: int) -> int:
        """Make and store about so many bytes of samples; returns how many it is."""
        count = max(1, nbytes // encoded_size(tokens))
        self._samples = SampleBatch.of(_sample(tokens, number) for number in range(count))
        self._references = SampleBatch.of(self._store.put(self._samples.samples))
        return count * encoded_size(tokens)

    @served
    async def references(self) -> SampleBatch:
        return self._references

    @served
    async def samples(self) -> SampleBatch:
        return self._samples

    @served
    async def empty(self) -> None:
        self._store.release(self._references.stored_ids[self._store.name])

    @served
    async def close(self) -> None:
        self._store.close()

    @served
    async def expose(self, ids: tuple[int, ...]) -> tuple[Any, int]:
        exposed = await asyncio.to_thread(lambda: Exposed(self._store.read(ids)))
        self._exposed[exposed.token] = exposed
        return exposed.handle, exposed.token

    @served
    async def withdraw(self, token: int) -> None:
        await asyncio.to_thread(self._exposed.pop(token).drop)


class Rank(ConnectedActor):
    """A trainer rank without a policy."""

    def __init__(self) -> None:
        self._sources: dict[str, SampleSource] = {"shared_memory": SharedMemorySource()}

    @served
    async def attach(self, stores: dict[str, Any]) -> None:
        self._sources["rdma"] = RdmaSource({name: RemoteStore(store, name) for name, store in stores.items()})

    @served
    async def copy(self, nbytes: int) -> float:
        """Seconds of a plain copy, warm."""
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        started = time.perf_counter()
        target[:] = source
        return time.perf_counter() - started

    @served
    async def take(self, transport: str, batch: SampleBatch) -> float:
        """Have the samples of a batch through a transport; returns the seconds that it took to fetch them."""
        context = contextvars.copy_context()

        def fetch() -> float:
            started = time.perf_counter()
            samples = self._sources[transport].fetch(batch)
            seconds = time.perf_counter() - started
            if len(samples) != len(batch):
                raise RuntimeError(f"{len(samples)} samples came, not {len(batch)}")
            return seconds

        return await asyncio.get_running_loop().run_in_executor(None, lambda: context.run(fetch))


def _sample(tokens: int, number: int) -> TrainingSample:
    random = np.random.default_rng(number)
    mask = np.arange(tokens) > 0
    return TrainingSample(
        group_id=number // 8,
        sample=number % 8,
        token_ids=random.integers(0, 1 << 17, tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=-random.random(tokens, dtype=np.float32) * mask,
        versions=np.where(mask, np.int64(7), np.int64(-1)),
        advantage=0.0,
        reward=0.0,
    )
