"""`SampleStore`: finished samples in the memory of the process that made them, readable by all processes of its host.

    put -> references -> (lease -> fetch elsewhere -> end_lease) -> release -> the memory is used again

What always holds:

- A stored sample's bytes do not change until it is released and no lease of it is left.
- Nothing is half stored: `put` stores all samples or raises and keeps none.
- After `close` no file is left, whatever is still held; what that was is told.

Thread-safe. Bytes are written outside the lock: a release does not wait for a large `put`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_rl.data_plane.arena import CHUNK_BYTES, Allocator, Block, SharedArena
from titan_rl.data_plane.layout import encode_into, encoded_size
from titan_rl.data_plane.ledger import HeldReport, Ledger, StoredSample
from titan_rl.data_plane.refs import SHARED_MEMORY, SampleRef, location_of, version_span
from titan_rl.errors import OwnershipError, SampleStoreFull
from titan_rl.types import TrainingSample
from titan_rl.weights.transports.segment_files import DIRECTORY

DEFAULT_MAX_BYTES = 1 << 30
"""About 60 million tokens."""


class SampleStore:
    """The samples of one process.

    Args:
        name: a plain word that no other store of this owner has or had, such as a worker's rank and process id.
        owner_pid: process whose death makes the files rubbish: the run's controller.
        max_bytes: shared memory that the store may take.
        spare_bytes: of it, what is kept for the next samples when all are released. Less costs time in every step,
            because fresh memory is eight times as slow; None: a quarter of `max_bytes`.
        scheme: how others read the samples: the word in front of their location.
        clock: seconds, never going back; for leases.
        directory: of the files.
    """

    def __init__(
        self,
        name: str,
        *,
        owner_pid: int,
        max_bytes: int = DEFAULT_MAX_BYTES,
        spare_bytes: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        scheme: str = SHARED_MEMORY,
        clock: Callable[[], float] = time.monotonic,
        directory: Path = DIRECTORY,
    ) -> None:
        allocator = Allocator(
            chunk_bytes=min(chunk_bytes, max_bytes),
            max_bytes=max_bytes,
            spare_bytes=max_bytes // 4 if spare_bytes is None else spare_bytes,
        )
        self.name = name
        self._scheme = scheme
        self._clock = clock
        self._lock = threading.Lock()
        self._arena = SharedArena(name, owner_pid=owner_pid, allocator=allocator, directory=directory)
        self._ledger = Ledger(name, clock)
        self._blocks: dict[int, Block] = {}
        self._next_id = 0
        self._closed = False

    def put(self, samples: Sequence[TrainingSample], *, attempt: int, owner: str) -> tuple[SampleRef, ...]:
        """Store copies of these samples.

        Args:
            samples: of finished groups.
            attempt: how often their group was run before under the same id.
            owner: who has to release them; for reports.

        Raises:
            SampleStoreFull: the store's bound, or what the host has left.
            OwnershipError: the store is closed.
            ValueError: a sample's array has another dtype than its type says.
        """
        sizes = [encoded_size(len(sample.token_ids)) for sample in samples]
        blocks, views = self._allocate(sizes)
        try:
            written = [_write(view, sample) for view, sample in zip(views, samples, strict=True)]
        except BaseException:
            with self._lock:
                self._free(blocks)
            raise
        with self._lock:
            self._check_open()
            refs = tuple(
                self._reference(sample, attempt, block, numbers, self._next_id + index)
                for index, (sample, block, numbers) in enumerate(zip(samples, blocks, written, strict=True))
            )
            self._next_id += len(refs)
            self._ledger.put(
                [StoredSample(ref.sample_id, ref.group_id, ref.sample, attempt, ref.nbytes) for ref in refs], owner
            )
            self._blocks.update((ref.sample_id, block) for ref, block in zip(refs, blocks, strict=True))
        return refs

    def lease(self, ids: Iterable[int], consumer: str, seconds: float) -> None:
        """Keep samples for `consumer` for so long, even if they are released meanwhile.

        Raises:
            OwnershipError: an id is unknown, released, or leased by this consumer already; nothing was leased.
        """
        with self._lock:
            self._expire()
            self._ledger.lease(ids, consumer, self._clock() + seconds)

    def renew(self, ids: Iterable[int], consumer: str, seconds: float) -> None:
        """Let leases end so long from now. Raises OwnershipError if one expired before: its bytes may be gone."""
        with self._lock:
            self._expire()
            self._ledger.renew(ids, consumer, self._clock() + seconds)

    def end_lease(self, ids: Iterable[int], consumer: str) -> None:
        """The consumer needs these no more. Raises OwnershipError if it does not lease one of them."""
        with self._lock:
            self._expire()
            self._reclaim(self._ledger.end_lease(ids, consumer))

    def end_leases_of(self, consumer: str) -> None:
        """The consumer is dead, or through with all it leased."""
        with self._lock:
            self._expire()
            self._reclaim(self._ledger.end_leases_of(consumer))

    def release(self, ids: Iterable[int]) -> None:
        """The owner gives these samples up for good.

        Raises:
            OwnershipError: an id was released before, or is unknown; nothing was released.
        """
        with self._lock:
            self._expire()
            self._reclaim(self._ledger.release(ids))

    def read(self, ids: Sequence[int]) -> np.ndarray:
        """The bytes of these samples, one after the other: [bytes] uint8, a copy.

        Raises:
            OwnershipError: the store is closed, or an id is not held.
        """
        with self._lock:
            self._check_open()
            self._expire()
            sizes = self._ledger.sizes(ids)
            views = [
                self._arena.view(self._blocks[sample_id], size) for sample_id, size in zip(ids, sizes, strict=True)
            ]
            return np.concatenate([np.frombuffer(view, np.uint8) for view in views])

    def held(self) -> HeldReport:
        """What is held now, by group and holder."""
        with self._lock:
            self._expire()
            return self._ledger.held()

    def close(self) -> list[str]:
        """Remove all files; nothing can be stored or fetched any more.

        Returns:
            One line per sample that was still held, with its holders: leaks, if the run has ended well.
        """
        with self._lock:
            if self._closed:
                return []
            self._closed = True
            self._expire()
            self._arena.close()
            return self._ledger.leaks()

    def _allocate(self, sizes: list[int]) -> tuple[list[Block], list[memoryview]]:
        """All blocks or none, and what to write to: views stay writable even if the store is closed meanwhile."""
        blocks: list[Block] = []
        with self._lock:
            self._check_open()
            self._expire()
            try:
                for size in sizes:
                    blocks.append(self._arena.allocate(size))
            except SampleStoreFull as error:
                self._free(blocks)
                raise SampleStoreFull(f"sample store {self.name}: {error}") from error
            except BaseException:
                self._free(blocks)
                raise
            return blocks, [self._arena.view(block, size) for block, size in zip(blocks, sizes, strict=True)]

    def _reference(
        self, sample: TrainingSample, attempt: int, block: Block, numbers: _Written, sample_id: int
    ) -> SampleRef:
        return SampleRef(
            store=self.name,
            sample_id=sample_id,
            group_id=sample.group_id,
            sample=sample.sample,
            attempt=attempt,
            length=len(sample.token_ids),
            trained_tokens=numbers.trained_tokens,
            reward=sample.reward,
            advantage=sample.advantage,
            oldest_version=numbers.oldest_version,
            newest_version=numbers.newest_version,
            location=location_of(self._scheme, self._arena.path(block)),
            offset=block.offset,
            nbytes=numbers.nbytes,
            checksum=numbers.checksum,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise OwnershipError(f"sample store {self.name} is closed")

    def _expire(self) -> None:
        self._reclaim(self._ledger.expire())

    def _reclaim(self, ids: Iterable[int]) -> None:
        self._free([self._blocks.pop(sample_id) for sample_id in ids])

    def _free(self, blocks: Iterable[Block]) -> None:
        if not self._closed:
            for block in blocks:
                self._arena.free(block)


class _Written(NamedTuple):
    """What had to be computed from a sample's arrays, outside the lock."""

    nbytes: int
    checksum: int
    trained_tokens: int
    oldest_version: int
    newest_version: int


def _write(view: memoryview, sample: TrainingSample) -> _Written:
    checksum = encode_into(view, sample)
    return _Written(len(view), checksum, int(np.count_nonzero(sample.loss_mask)), *version_span(sample))
