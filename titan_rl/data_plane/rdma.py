"""Samples out of stores on any host, through Monarch: RDMA where the hosts have it, TCP otherwise.

    reader ── expose(ids) ──▶ store: a copy of the samples, registered      reader ◀── the bytes, past all mailboxes ──
    reader ── withdraw ─────▶ store: the copy is gone

The copy makes a fetch independent of what the store does meanwhile, and one operation of many samples. Nothing stays
registered between two fetches. As everywhere, what arrived is verified in the reader's own memory.

Monarch's transfers need an actor's context: a source takes the one that is current when it is made.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from monarch.rdma import RDMABuffer

from titan_rl.data_plane.layout import decode
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import SampleError
from titan_rl.types import TrainingSample

FETCH_SECONDS = 120
"""Bound on fetching one micro-batch's samples from one store."""

_tokens = itertools.count()


class Exposed:
    """Bytes that others can read until `drop`. Make and drop it in an actor's context, away from its event loop."""

    def __init__(self, content: np.ndarray) -> None:
        self._content = content  # [bytes] uint8; registered memory must live as long as its handle
        self.token = next(_tokens)
        self.handle = RDMABuffer(content.data)

    def drop(self) -> None:
        self.handle.drop().get(timeout=FETCH_SECONDS)


class ExposingStore(Protocol):
    """A store on any host. Both methods block, for a bounded time, and raise when it is gone."""

    def expose(self, ids: tuple[int, ...]) -> tuple[RDMABuffer, int]:
        """Make samples readable: a buffer of their encodings one after the other, and a token for `withdraw`."""
        ...

    def withdraw(self, token: int) -> None:
        """The reader is through."""
        ...


class RdmaSource:
    """Reads stores wherever they are.

    Args:
        stores: by name.
    """

    def __init__(self, stores: Mapping[str, ExposingStore]) -> None:
        self._stores = dict(stores)
        self._context = contextvars.copy_context()

    def fetch(self, batch: SampleBatch) -> tuple[TrainingSample, ...]:
        """See `fetch.SampleSource`. Must not be called in an event loop."""
        if batch.is_local:
            return batch.samples
        positions: dict[str, list[int]] = {}
        for position, ref in enumerate(batch.refs):
            positions.setdefault(ref.store, []).append(position)
        found: dict[int, TrainingSample] = {}
        for store, places in positions.items():
            found.update(zip(places, self._fetch_from(store, batch.select(places)), strict=True))
        return tuple(found[position] for position in range(len(batch)))

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
            sample_id: decode(
                content[end - ref.nbytes : end].data, ref.checksum, group_id=ref.group_id, sample=ref.sample
            )
            for (sample_id, ref), end in zip(distinct.items(), ends, strict=True)
        }
        return [samples[ref.sample_id] for ref in batch.refs]

    def _read(self, store: str, ids: tuple[int, ...], content: np.ndarray) -> None:
        buffer, token = self._stores[store].expose(ids)
        try:
            buffer.read_into(content.data, timeout=FETCH_SECONDS).get(timeout=FETCH_SECONDS)
        finally:
            self._stores[store].withdraw(token)
