"""Memory for samples: blocks in chunks, and chunks as shared-memory files.

What always holds:

- Blocks in use never overlap, and a block lies in one chunk.
- Chunks take `max_bytes` at most; what does not fit is refused, and nothing is changed.
- Memory is recycled: a freed block is used again, empty chunks are kept up to `spare_bytes` (a fresh one costs the time
  of eight copies, because the kernel has to find and clear it) and unlinked beyond that. A block larger than a chunk
  gets a chunk of its own, which goes with it.
- A chunk's number is never used again, so the name of its file means one file for as long as the store lives.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from pathlib import Path
from typing import NamedTuple

from titan_rl.errors import ConfigError, SampleStoreFull
from titan_rl.weights.transports.segment_files import DIRECTORY, segment_path

CHUNK_BYTES = 8 << 20
"""Of one file. Smaller: more files to map for a reader. Larger: a tiny run holds memory that it never fills."""
BLOCK_ALIGNMENT = 64
"""Bytes; a cache line, so that two samples never share one."""


class Block(NamedTuple):
    """`nbytes` bytes at `offset` of a chunk."""

    chunk: int
    offset: int
    nbytes: int


class Allocator:
    """Decides where blocks lie; touches no memory. The caller makes and removes chunks as `chunks` says.

    Args:
        chunk_bytes: of a chunk that holds many blocks; a multiple of BLOCK_ALIGNMENT.
        max_bytes: of all chunks together.
        spare_bytes: of empty chunks that are kept.
    """

    def __init__(self, *, chunk_bytes: int, max_bytes: int, spare_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._max_bytes = max_bytes
        self._spare_bytes = spare_bytes
        self._chunks: dict[int, _Chunk] = {}
        self._next_chunk = 0
        self.chunks: dict[int, int] = {}
        """Size by number of every chunk that has to exist now. Read it, never write."""

    @property
    def used_bytes(self) -> int:
        """In blocks, their rounding up included."""
        return sum(chunk.nbytes - chunk.free_bytes for chunk in self._chunks.values())

    def allocate(self, nbytes: int) -> Block:
        """A block of at least `nbytes` (>= 1), in the oldest chunk that has room, else in a new one.

        Raises:
            SampleStoreFull: a new chunk would pass `max_bytes`, spare ones given up.
        """
        size = -(-nbytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
        if size <= self._chunk_bytes:
            for number, chunk in self._chunks.items():
                offset = chunk.take(size)
                if offset is not None:
                    return Block(number, offset, size)
        number = self._new_chunk(max(size, self._chunk_bytes))
        offset = self._chunks[number].take(size)
        assert offset == 0
        return Block(number, offset, size)

    def free(self, block: Block) -> None:
        """Give a block back. Raises KeyError for one that is not in use."""
        chunk = self._chunks[block.chunk]
        chunk.give_back(block.offset)
        if chunk.empty and (chunk.nbytes != self._chunk_bytes or self._empty_bytes() > self._spare_bytes):
            self._drop(block.chunk)

    def discard(self, block: Block) -> None:
        """Forget the chunk of a block that was just allocated in it, because the chunk cannot be made."""
        self._drop(block.chunk)

    def _new_chunk(self, nbytes: int) -> int:
        empty = [number for number, chunk in self._chunks.items() if chunk.empty]
        total = sum(self.chunks.values())
        excess = total + nbytes - self._max_bytes
        if excess > len(empty) * self._chunk_bytes:
            raise SampleStoreFull(
                f"no room for {nbytes} bytes more: samples take {self.used_bytes} bytes in {len(self._chunks)} chunks "
                f"of together {total} bytes, and the bound is {self._max_bytes} (data_plane.store_mib)"
            )
        for number in empty:
            if excess <= 0:
                break
            excess -= self.chunks[number]
            self._drop(number)
        number = self._next_chunk
        self._next_chunk += 1
        self._chunks[number] = _Chunk(nbytes)
        self.chunks[number] = nbytes
        return number

    def _drop(self, number: int) -> None:
        del self._chunks[number], self.chunks[number]

    def _empty_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks.values() if chunk.empty)


class _Chunk:
    """The free and used ranges of one chunk; free ones are sorted, and no two of them touch."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free_bytes = nbytes
        self._offsets = [0]  # of free ranges
        self._sizes = [nbytes]
        self._used: dict[int, int] = {}  # size by offset

    @property
    def empty(self) -> bool:
        return not self._used

    def take(self, size: int) -> int | None:
        """The first free range that is large enough, from its beginning; None if there is none."""
        if size > self.free_bytes:
            return None
        index = next((index for index, free in enumerate(self._sizes) if free >= size), None)
        if index is None:
            return None
        offset = self._offsets[index]
        if self._sizes[index] == size:
            del self._offsets[index], self._sizes[index]
        else:
            self._offsets[index] += size
            self._sizes[index] -= size
        self._used[offset] = size
        self.free_bytes -= size
        return offset

    def give_back(self, offset: int) -> None:
        size = self._used.pop(offset)
        self.free_bytes += size
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and offset + size == self._offsets[index]:
            size += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if index and self._offsets[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += size
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, size)


class SharedArena:
    """An allocator's chunks as mapped files that other processes of the host can read. Not thread-safe.

    Args:
        store: its name, part of every file's; a plain word, which no other store of this owner had before.
        owner_pid: process whose death makes the files rubbish (see `segment_files`).
        directory: of the files.
    """

    def __init__(self, store: str, *, owner_pid: int, allocator: Allocator, directory: Path = DIRECTORY) -> None:
        self._store = store
        self._owner_pid = owner_pid
        self._directory = directory
        self._allocator = allocator
        self._mapped: dict[int, memoryview] = {}
        self._path(0)  # refuses a name that no file can have

    def allocate(self, nbytes: int) -> Block:
        """A block to write `nbytes` to.

        Raises:
            SampleStoreFull: the store's bound, or what the host has left.
            ConfigError: a store of this name and owner exists or existed.
        """
        block = self._allocator.allocate(nbytes)
        if block.chunk not in self._mapped:
            self._remove_dropped()
            try:
                self._mapped[block.chunk] = _create(self._path(block.chunk), self._allocator.chunks[block.chunk])
            except BaseException:
                self._allocator.discard(block)
                raise
        return block

    def view(self, block: Block, nbytes: int) -> memoryview:
        """The first `nbytes` of a block, writable. Good until the block is freed."""
        return self._mapped[block.chunk][block.offset : block.offset + nbytes]

    def path(self, block: Block) -> Path:
        return self._path(block.chunk)

    def free(self, block: Block) -> None:
        self._allocator.free(block)
        if block.chunk not in self._allocator.chunks:
            self._remove_dropped()

    def close(self) -> None:
        """Remove all files. Mappings of readers stay valid."""
        for chunk in self._mapped:
            self._path(chunk).unlink(missing_ok=True)
        self._mapped.clear()

    def _remove_dropped(self) -> None:
        for chunk in self._mapped.keys() - self._allocator.chunks.keys():
            self._path(chunk).unlink(missing_ok=True)
            del self._mapped[chunk]  # unmapped with its last view

    def _path(self, chunk: int) -> Path:
        return segment_path(self._directory, self._owner_pid, _channel(self._store), chunk)


def remove_store_files(store: str, *, owner_pid: int, directory: Path = DIRECTORY) -> list[Path]:
    """Remove what a store left whose process was killed while its owner lives on; returns which files."""
    prefix = segment_path(directory, owner_pid, _channel(store), 0).name.removesuffix("0")
    removed = sorted(path for path in directory.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdigit())
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def _channel(store: str) -> str:
    return f"samples.{store}"


def _create(path: Path, nbytes: int) -> memoryview:
    """A new file, mapped, whose memory is really there, so that no write to it can fail later."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: two sample stores have one name, or a dead one was not removed") from error
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return memoryview(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE))
    except OSError as error:
        path.unlink()
        state = os.statvfs(path.parent)
        raise SampleStoreFull(
            f"{nbytes} bytes for samples do not fit in {path.parent}, where {state.f_bavail * state.f_frsize} bytes "
            f"are free ({error.strerror}); make it larger (containers: --shm-size) or keep fewer samples"
        ) from error
    finally:
        os.close(descriptor)
