"""Actors of test_sample_calls.py: one keeps samples, another one fetches them, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
from sample_examples import bits

from titan_rl.actors.sample_stores import AnyHostSource, StoreKeeper
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleStore
from titan_rl.errors import SampleError
from titan_rl.rpc.connection import ConnectedActor, endpoint
from titan_rl.types import TrainingSample


class Keeper(StoreKeeper):
    """What a rollout worker is to a trainer rank: a store whose samples can be read from other hosts."""

    def __init__(self, name: str, owner_pid: int) -> None:
        super().__init__(SampleStore(name, owner_pid=owner_pid))

    @endpoint
    async def put(self, samples: SampleBatch) -> SampleBatch:
        return SampleBatch.of(self._store.put(samples.samples))

    @endpoint
    async def release(self, batch: SampleBatch) -> None:
        self._store.release(batch.stored_ids[self._store.name])

    @endpoint
    async def damage(self, batch: SampleBatch, position: int) -> None:
        """Change a byte of each of these samples where they are stored."""
        for ref in batch.refs:
            file = np.memmap(ref.location, np.uint8, "r+")
            file[ref.offset + position % ref.nbytes] ^= 4

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def close(self) -> None:
        self._store.close()


class Fetcher(ConnectedActor):
    """What a trainer rank is: it fetches in a thread, which has no context of Monarch's."""

    @endpoint
    async def attach(self, stores: dict[str, Any]) -> None:
        self._source = AnyHostSource(stores)

    @endpoint
    async def bits(self, batch: SampleBatch) -> list[tuple[object, ...]]:
        """Of what was fetched, in its order. Raises SampleError."""
        return await self._run(lambda: [bits(sample) for sample in self._source.fetch(batch)])

    @endpoint
    async def error(self, batch: SampleBatch) -> tuple[int, int, str]:
        """Group, sample and message of the SampleError that fetching raises; zeros if none."""

        def fetch() -> tuple[int, int, str]:
            try:
                fetched: tuple[TrainingSample, ...] = self._source.fetch(batch)
            except SampleError as error:
                return error.group_id, error.sample, str(error)
            return 0, 0, f"{len(fetched)} samples came"

        return await self._run(fetch)

    async def _run(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, work)
