"""Samples out of stores on any host: shared memory on the same host, a call of the store's actor on others.

A micro-batch is about a megabyte, so a call is enough between hosts. The reader verifies samples in its own memory.
"""

import asyncio
import contextvars
import itertools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleStore, SharedMemorySource, decode
from titan_rl.errors import CallTimeout, SampleError, TitanError
from titan_rl.rpc.connection import ConnectedActor, Connection, endpoint
from titan_rl.types import TrainingSample

PATIENCE_SECONDS = 10
SLOWEST_BYTES_PER_SECOND = 10 << 20
"""Bound on fetching one micro-batch's samples from one store: the patience, and its bytes at this speed. Monarch does
not report a host that is gone, so this is how long a trainer waits for the samples that it held."""


class StoreKeeper(ConnectedActor):
    """An actor with a sample store that processes on any host can read."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    @endpoint
    async def read(self, ids: tuple[int, ...]) -> np.ndarray:
        """The encodings of stored samples, one after the other."""
        return self._store.read(ids)


class AnyHostSource:
    """A `SampleSource` that reads stores wherever they are.

    Make it in an actor's event loop: its threads then call the stores through that loop, as that actor. `stores`:
    handles of `StoreKeeper`s on other hosts, by the names of their stores; any other store is on this host.
    """

    def __init__(self, stores: Mapping[str, Any]) -> None:
        self._stores = {name: Connection(keeper, what=f"{{}} of store {name}") for name, keeper in stores.items()}
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._here = SharedMemorySource()
        self._silent_until: dict[str, float] = {}  # by store that did not answer

    def fetch(self, batch: SampleBatch) -> tuple[TrainingSample, ...]:
        """Must not be called in an event loop."""
        if batch.samples is not None:
            return batch.samples
        positions: dict[str, list[int]] = {}
        for position, ref in enumerate(batch.refs):
            positions.setdefault(ref.store, []).append(position)
        found: dict[int, TrainingSample] = {}
        for store, places in positions.items():
            theirs = batch.select(places)
            samples = self._fetch_from(store, theirs) if store in self._stores else self._here.fetch(theirs)
            found.update(zip(places, samples, strict=True))
        return tuple(found[position] for position in range(len(batch)))

    async def close(self) -> None:
        await asyncio.gather(*(keeper.close() for keeper in self._stores.values()))

    def _fetch_from(self, store: str, batch: SampleBatch) -> list[TrainingSample]:
        ends = np.cumsum([0, *(ref.nbytes for ref in batch.refs)]).tolist()
        reading = self._read(store, tuple(ref.sample_id for ref in batch.refs), ends[-1])
        try:
            content = self._context.copy().run(asyncio.run_coroutine_threadsafe, reading, self._loop).result()
        except TitanError as error:
            reason = f"store {store} could not be read: {type(error).__name__}: {error}"
            raise SampleError(reason, batch.refs[0].group_id, batch.refs[0].sample) from error
        return [*map(decode, (content[a:b].data for a, b in itertools.pairwise(ends)), batch.refs)]

    async def _read(self, store: str, ids: tuple[int, ...], nbytes: int) -> np.ndarray:
        if time.monotonic() < self._silent_until.get(store, 0.0):
            raise CallTimeout("it did not answer a moment ago")  # for every group of a step, one after the other
        seconds = PATIENCE_SECONDS + nbytes // SLOWEST_BYTES_PER_SECOND
        try:
            return await self._stores[store].call(seconds, StoreKeeper.read, ids)
        except CallTimeout:
            self._silent_until[store] = time.monotonic() + PATIENCE_SECONDS
            raise
