"""Fetches samples by their references.

A source returns exactly the stored samples or raises `SampleError` with the group's id. It first copies the bytes and
then verifies the copy. The returned samples belong to the caller and do not change when the stored ones are released.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from titan_rl.data_plane.layout import decode
from titan_rl.data_plane.refs import SampleRef
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import SampleError
from titan_rl.types import TrainingSample


class SampleSource(Protocol):
    """What fetches. Thread-safe."""

    def fetch(self, batch: SampleBatch) -> tuple[TrainingSample, ...]:
        """The samples of a batch, in its order; those of a local one as they are.

        Raises:
            SampleError: a sample is missing or damaged.
        """
        ...


class SharedMemorySource:
    """Reads stores of the same host, whatever process they are in.

    The samples of one fetch share one buffer: it is freed with the last of them.
    """

    def fetch(self, batch: SampleBatch) -> tuple[TrainingSample, ...]:
        """See `SampleSource`."""
        if batch.is_local:
            return batch.samples
        refs = batch.refs
        ends = np.cumsum([ref.nbytes for ref in refs]).tolist()
        # One buffer for the whole batch: a large one gets huge pages, which is what makes fresh memory quick.
        buffer = np.empty(ends[-1], np.uint8).data
        by_file: dict[str, list[int]] = {}
        for index, ref in enumerate(refs):
            by_file.setdefault(ref.location, []).append(index)
        samples: dict[int, TrainingSample] = {}
        for path, indices in by_file.items():
            first = refs[indices[0]]
            try:
                with open(path, "rb", buffering=0) as file:
                    for index in indices:
                        ref, end = refs[index], ends[index]
                        samples[index] = _read(file.fileno(), ref, buffer[end - ref.nbytes : end])
            except OSError as error:
                reason = f"its file {path} cannot be read (store {first.store}): {error.strerror}"
                raise SampleError(reason, first.group_id, first.sample) from error
        return tuple(samples[index] for index in range(len(refs)))


def prefetched(
    source: SampleSource, batches: Sequence[SampleBatch]
) -> Generator[tuple[TrainingSample, ...], None, None]:
    """What `source.fetch` gives for each batch, in order, fetched by one thread while the caller works on the last one.

    One batch is held besides the caller's. An error comes where its batch's samples would have come. The thread ends
    with the iterator: at its end, at an error, and when it is closed or dropped.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        ahead: Future[tuple[TrainingSample, ...]] | None = None
        for batch in batches:
            current, ahead = ahead, thread.submit(source.fetch, batch)
            if current is not None:
                yield current.result()
        if ahead is not None:
            yield ahead.result()


def _read(file: int, ref: SampleRef, piece: memoryview) -> TrainingSample:
    if (found := os.preadv(file, [piece], ref.offset)) != ref.nbytes:
        reason = f"{ref.location} holds {found} of its {ref.nbytes} bytes"
        raise SampleError(reason, ref.group_id, ref.sample)
    return decode(piece, ref.checksum, group_id=ref.group_id, sample=ref.sample)
