"""Samples out of stores on any host: shared memory on the same host, through Monarch from others (RDMA where the hosts
have it, TCP otherwise).

    reader ── expose(ids) ──▶ store: a copy of the samples, registered      reader ◀── the bytes, past all mailboxes ──
    reader ── withdraw ─────▶ store: the copy is gone

The copy makes a fetch independent of what the store does meanwhile, and one operation of many samples. Nothing stays
registered between two fetches; what a reader left that died, goes with the next fetch after its bound. The reader
verifies the samples in its own memory.
"""

import asyncio
import contextvars
import itertools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from monarch.rdma import RDMABuffer

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleStore, SharedMemorySource, decode
from titan_rl.errors import CallTimeout, SampleError
from titan_rl.rpc.connection import ConnectedActor, Connection, endpoint
from titan_rl.types import TrainingSample

PATIENCE_SECONDS = 10
SLOWEST_BYTES_PER_SECOND = 10 << 20
"""Bound on fetching one micro-batch's samples from one store: the patience, and its bytes at this speed. Monarch does
not report a host that is gone, so this is how long a trainer waits for the samples that it held."""


def _fetch_seconds(nbytes: int) -> int:
    return PATIENCE_SECONDS + nbytes // SLOWEST_BYTES_PER_SECOND


class StoreKeeper(ConnectedActor):
    """An actor with a sample store that processes on any host can read."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store
        # registered memory must outlive its handle; and until when a living reader may read it
        self._exposed: dict[int, tuple[RDMABuffer, np.ndarray, float]] = {}
        self._tokens = itertools.count()

    @endpoint
    async def expose(self, ids: tuple[int, ...]) -> tuple[RDMABuffer, int]:
        """Make stored samples readable from other hosts until `withdraw`, or until nobody can be reading them any more.
        Returns a handle on a buffer with the samples' encodings one after the other, and a token for `withdraw`."""

        def register() -> tuple[RDMABuffer, np.ndarray, float]:
            content = self._store.read(ids)
            return RDMABuffer(content.data), content, time.monotonic() + 2 * _fetch_seconds(len(content))

        for left in [token for token, (*_, until) in self._exposed.items() if until < time.monotonic()]:
            await StoreKeeper.withdraw.answer(self, left)
        token = next(self._tokens)
        self._exposed[token] = await asyncio.to_thread(register)  # Monarch refuses it in an event loop
        return self._exposed[token][0], token

    @endpoint
    async def withdraw(self, token: int) -> None:
        """The reader is done with an exposed buffer."""
        if (exposed := self._exposed.pop(token, None)) is not None:
            await asyncio.to_thread(lambda: exposed[0].drop().get(timeout=PATIENCE_SECONDS))


class AnyHostSource:
    """A `SampleSource` that reads stores wherever they are.

    Make it in an actor's event loop; its threads then call the stores through that loop, and Monarch's transfers need
    that actor's context. `stores`: handles of `StoreKeeper`s on other hosts, by the names of their stores; any other
    store is on this host.
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
        distinct = {ref.sample_id: ref for ref in batch.refs}
        ends = np.cumsum([ref.nbytes for ref in distinct.values()]).tolist()
        content = np.empty(ends[-1], np.uint8)
        try:
            # In a context of its own: prefetching threads come and go, and one context serves one thread at a time.
            self._context.copy().run(self._read, store, tuple(distinct), content)
        except Exception as error:  # whatever is raised about a process that is gone, Monarch's traceback cut off
            reason = f"store {store} could not be read: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise SampleError(reason, batch.refs[0].group_id, batch.refs[0].sample) from error
        samples = {
            sample_id: decode(content[end - ref.nbytes : end].data, ref)
            for (sample_id, ref), end in zip(distinct.items(), ends, strict=True)
        }
        return [samples[ref.sample_id] for ref in batch.refs]

    def _read(self, store: str, ids: tuple[int, ...], content: np.ndarray) -> None:
        if time.monotonic() < self._silent_until.get(store, 0.0):
            raise CallTimeout("it did not answer a moment ago")  # for every group of a step, one after the other
        seconds, keeper = _fetch_seconds(len(content)), self._stores[store]

        async def expose() -> tuple[RDMABuffer, int]:
            return await keeper.call(seconds, StoreKeeper.expose, ids)

        try:
            buffer, token = asyncio.run_coroutine_threadsafe(expose(), self._loop).result()
        except CallTimeout:
            self._silent_until[store] = time.monotonic() + PATIENCE_SECONDS
            raise
        try:
            buffer.read_into(content.data, timeout=seconds).get(timeout=seconds)
        finally:
            self._loop.call_soon_threadsafe(keeper.tell, StoreKeeper.withdraw, token)
