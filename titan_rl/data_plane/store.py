"""`SampleStore` keeps finished samples in shared memory of the host that made them; a `SampleSource` reads them.

    put ─▶ one file, references to its samples ─▶ fetch elsewhere ─▶ release by id; the file goes with its last sample

A sample is flat bytes, little-endian; its numbers travel in its reference. The round trip is exact, NaN included.

    token_ids int32 [L] | logprobs float32 [L] | versions int64 [L] | advantages float32 [L] |
    where there are any, supports: sizes int32 [L], values int32 | and routes int16 [L, layers, k] |
    loss_mask uint8 [L] | zeros to 8 B

- A stored sample's bytes never change: a file is written once and removed once.
- `put` stores all samples or raises and keeps none.
- A sample is released exactly once. A second release, and any call about an unknown id, is an `InvariantError` that
  names it and changes nothing: a call about many samples is all or nothing.
- After `close` no file is left, whatever is still held. Files of a killed owner are swept (see `segment_files`).

- A source returns exactly the stored samples or raises `SampleError` with the group's id: it copies the bytes first and
  then verifies the copy. The samples belong to the caller and do not change when the stored ones are released.
"""

import itertools
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest as checksum_of

from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef, encoded_size, reference_to
from titan_rl.errors import ConfigError, InvariantError, SampleError, SampleStoreFull, SharedMemoryFull, StorageError
from titan_rl.support import Supports
from titan_rl.types import TrainingSample
from titan_rl.weights.segment_files import DIRECTORY, segment_path

_ARRAYS = (
    ("token_ids", np.dtype("<i4")),
    ("logprobs", np.dtype("<f4")),
    ("versions", np.dtype("<i8")),
    ("advantages", np.dtype("<f4")),
    ("loss_mask", np.dtype(np.bool_)),
)
"""In the order of the bytes, which keeps each array at a multiple of its item's size."""


def encode(samples: Iterable[TrainingSample]) -> tuple[bytes, list[int]]:
    """The bytes of these samples one after the other, and the checksum of each."""
    parts: list[bytes | memoryview] = []
    sizes = []
    for sample in samples:
        arrays = [np.ascontiguousarray(getattr(sample, name), dtype) for name, dtype in _ARRAYS]
        if sample.supports is not None:
            arrays[-1:-1] = sample.supports.sizes, sample.supports.values
        if sample.routes is not None:
            arrays.insert(-1, np.ascontiguousarray(sample.routes, "<i2"))
        sizes.append(encoded_size(len(sample.token_ids), sample.support_bytes, sample.route_shape))
        parts += [array.data for array in arrays]
        parts.append(bytes(sizes[-1] - sum(array.nbytes for array in arrays)))
    content = b"".join(parts)
    ends = itertools.accumulate(sizes, initial=0)
    return content, [checksum_of(memoryview(content)[start:end]) for start, end in itertools.pairwise(ends)]


def decode(buffer: bytes | memoryview, ref: SampleRef) -> TrainingSample:
    """The sample that `ref` refers to, as views of `buffer`. Raises SampleError: the bytes are not what was written."""
    if (found := checksum_of(buffer)) != ref.checksum:
        reason = f"{len(buffer)} bytes with checksum {found:016x}, written was {ref.checksum:016x}"
        raise SampleError(reason, ref.group_id, ref.sample)
    arrays: dict[str, Any] = {"unrouted": ref.unrouted}
    offset = 0
    for name, dtype in _ARRAYS:
        if name == "loss_mask" and ref.support_bytes:
            whole = np.frombuffer(buffer, "<i4", ref.support_bytes // 4, offset)
            arrays["supports"] = Supports(sizes=whole[: ref.length], values=whole[ref.length :])
            offset += ref.support_bytes
        if name == "loss_mask" and (count := ref.length * math.prod(ref.route_shape)):
            arrays["routes"] = np.frombuffer(buffer, "<i2", count, offset).reshape(-1, *ref.route_shape)
            offset += 2 * count
        arrays[name] = np.frombuffer(buffer, dtype, ref.length, offset)
        offset += ref.length * dtype.itemsize
    return TrainingSample(group_id=ref.group_id, sample=ref.sample, reward=ref.reward, **arrays)


@dataclass(frozen=True, slots=True)
class HeldReport:
    store: str
    groups: dict[int, int]
    """How many samples, by group."""
    nbytes: int

    @property
    def samples(self) -> int:
        return sum(self.groups.values())

    def __str__(self) -> str:
        groups = ", ".join(f"{count} samples of group {group_id}" for group_id, count in self.groups.items())
        return f"{self.store}: {groups or 'nothing'}, {self.nbytes} bytes"


class SampleStore:
    """The samples of one process. Belongs to one thread. `name`: a plain word that no other store of this owner has or
    had, such as its mesh and process id. `owner_pid`: process whose death makes the files rubbish: the run's
    controller. `max_bytes`: shared memory that the samples may take."""

    def __init__(self, name: str, *, owner_pid: int, max_bytes: int = 1 << 30, directory: Path = DIRECTORY) -> None:
        self.name = name
        self._max_bytes = max_bytes
        self._held: dict[int, SampleRef] = {}
        self._in_file: Counter[str] = Counter()  # samples that are held
        self._nbytes = 0
        self._next_id = 0
        self._closed = False
        self._directory, self._owner_pid, self._channel = directory, owner_pid, channel_of(name)

    def put(self, samples: Sequence[TrainingSample]) -> tuple[SampleRef, ...]:
        """Store copies of these samples. The caller owns them and has to release them. Raises SampleStoreFull: the
        store's bound does not allow it; SharedMemoryFull: nor does what the host has left; InvariantError: the store is
        closed; ConfigError: a store of this name and owner exists or existed."""
        self._check_open()
        content, checksums = encode(samples)
        if self._nbytes + len(content) > self._max_bytes:
            taken = f"no room for {len(content)} bytes more: samples take {self._nbytes} bytes"
            bound = f"the bound is {self._max_bytes} (data_plane.store_mib)"
            raise SampleStoreFull(f"sample store {self.name}: {taken}, and {bound}")
        if not samples:
            return ()
        path = str(segment_path(self._directory, self._owner_pid, self._channel, self._next_id))
        _write(path, content)
        refs: list[SampleRef] = []
        offset = 0
        for sample_id, (sample, checksum) in enumerate(zip(samples, checksums, strict=True), start=self._next_id):
            stored = reference_to(sample)._replace(store=self.name, sample_id=sample_id, checksum=checksum)
            refs.append(stored._replace(location=path, offset=offset))
            offset += stored.nbytes
        self._next_id += len(refs)
        self._nbytes += len(content)
        self._in_file[path] = len(refs)
        self._held |= {ref.sample_id: ref for ref in refs}
        return tuple(refs)

    def release(self, ids: Iterable[int]) -> None:
        """The owner gives these samples up for good."""
        released = tuple(ids)
        refs = self._known(released, "released")
        if twice := [sample_id for sample_id, count in Counter(released).items() if count > 1]:
            raise InvariantError(f"{self.name}: sample id {twice[0]} is to be released twice in one call")
        for sample_id, ref in zip(released, refs, strict=True):
            del self._held[sample_id]
            self._nbytes -= ref.nbytes
            self._in_file[ref.location] -= 1
            if not self._in_file[ref.location]:
                del self._in_file[ref.location]
                Path(ref.location).unlink(missing_ok=True)

    def read(self, ids: Sequence[int]) -> np.ndarray:
        """The bytes of these samples, one after the other: [bytes] uint8, a copy."""
        self._check_open()
        return np.asarray(_read(self._known(ids, "read"))[0])

    def held(self) -> HeldReport:
        groups = Counter(ref.group_id for ref in self._held.values())
        return HeldReport(self.name, dict(sorted(groups.items())), self._nbytes)

    def close(self) -> HeldReport:
        """Remove all files; nothing can be stored or read any more. Returns what was still held."""
        report = self.held()
        self._closed = True
        for path in self._in_file:
            Path(path).unlink(missing_ok=True)
        self._held.clear()
        self._in_file.clear()
        self._nbytes = 0
        return report

    def _known(self, ids: Iterable[int], done: str) -> list[SampleRef]:
        known: list[SampleRef] = []
        for sample_id in ids:
            if sample_id not in self._held:
                past = "it was released before" if 0 <= sample_id < self._next_id else "it never existed"
                raise InvariantError(f"{self.name}: sample id {sample_id} cannot be {done}: {past}")
            known.append(self._held[sample_id])
        return known

    def _check_open(self) -> None:
        if self._closed:
            raise InvariantError(f"sample store {self.name} is closed")


def channel_of(store: str) -> str:
    """Of its files in shared memory, see `segment_files`."""
    return f"samples.{store}"


class SampleSource(Protocol):
    """Thread-safe."""

    def fetch(self, batch: SampleBatch) -> tuple[TrainingSample, ...]:
        """In the batch's order, those that it takes along as they are. Raises SampleError: one is lost or damaged."""


class SharedMemorySource:
    """Reads stores of the same host. The samples of one fetch share one buffer: it is freed with the last of them."""

    def fetch(self, batch: SampleBatch) -> tuple[TrainingSample, ...]:
        if batch.samples is not None:
            return batch.samples
        buffer, ends = _read(batch.refs)
        return tuple(map(decode, (buffer[a:b] for a, b in itertools.pairwise(ends)), batch.refs))


def write_samples(path: Path, samples: Sequence[TrainingSample]) -> None:
    """Write samples one after the other to a new file, for `references_in`. Raises StorageError."""
    try:
        with open(path, "xb") as file:
            for sample in samples:
                file.write(encode([sample])[0])
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}") from error


def references_in(path: Path, batch: SampleBatch) -> SampleBatch:
    """References to the samples in a file that `write_samples` has written, given those to their stores."""
    ends = itertools.accumulate((ref.nbytes for ref in batch.refs), initial=0)
    places = zip(batch.refs, ends, strict=False)
    return SampleBatch.of(ref._replace(location=str(path), offset=offset) for ref, offset in places)


def _write(path: str, content: bytes) -> None:
    """A new file with this content, or none."""
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: two sample stores have one name") from error
    except OSError as error:
        Path(path).unlink(missing_ok=True)
        directory = Path(path).parent
        free = shutil.disk_usage(directory).free
        problem = f"{len(content)} bytes for samples do not fit in {directory}, where {free} bytes are free"
        remedy = "make it larger (containers: --shm-size) or keep fewer samples"
        raise SharedMemoryFull(f"{problem} ({error.strerror}); {remedy}") from error


def _read(refs: Sequence[SampleRef]) -> tuple[memoryview, list[int]]:
    """A copy of the bytes of these samples, one after the other, and the end of each, after a 0. Raises SampleError."""
    ends = np.cumsum([0, *(ref.nbytes for ref in refs)]).tolist()
    # One buffer for all: a large one gets huge pages, which is what makes fresh memory quick.
    buffer = np.empty(ends[-1], np.uint8).data
    # Samples that follow each other in their file too are read at once.
    places = zip(refs, ends, ends[1:], strict=False)
    for _, run in itertools.groupby(places, key=lambda each: (each[0].location, each[0].offset - each[1])):
        (first, begin, end), *rest = run
        piece = buffer[begin : rest[-1][2] if rest else end]
        try:
            with open(first.location, "rb", buffering=0) as file:
                found = os.preadv(file.fileno(), [piece], first.offset)
        except OSError as error:
            reason = f"its file {first.location} cannot be read (store {first.store}): {error.strerror}"
            raise SampleError(reason, first.group_id, first.sample) from error
        if found != len(piece):
            reason = f"{first.location} holds {found} of its {len(piece)} bytes"
            raise SampleError(reason, first.group_id, first.sample)
    return buffer, ends
