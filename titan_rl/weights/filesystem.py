"""Publishes weights as safetensors files: for generators that share a filesystem, for other programs, for inspection.

    directory/channel/v7/model.safetensors      whole tensors, under Hugging Face names

- A version's directory appears complete, by one rename; until then it has a name that begins with a dot, and a
  writer that dies leaves only that, which the channel's next publisher removes.
- Every rank writes its own shards into the one file, at their places; no rank holds more than a chunk besides them.
- Released versions are removed; a reader that has one open keeps its bytes. What is live when the run ends stays.

Nothing is synced to the disk: after a power failure a version may be there with rubbish in it.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_rl.directories import check_replaceable
from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication, TensorEntry, TensorShard
from titan_rl.weights.publisher import ALIGNMENT, ChannelPublisher, Layout, Put, aligned, entry_view
from titan_rl.weights.segment_files import check_channel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCHEME = "file"
WEIGHTS = "model.safetensors"

_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
"""As safetensors calls them."""
_LENGTH_BYTES = 8
"""A safetensors file starts with the length of its JSON header, little endian."""


class FilesystemPublisher(ChannelPublisher):
    """See `ChannelPublisher`.

    Args:
        directory: all ranks and all readers see it under this path.
        rank: rank 0 makes, renames and removes directories.
    """

    alignment = 1  # safetensors allows no gaps; all tensors have one dtype, so each is aligned to its elements

    def __init__(self, *, channel: str, directory: Path, rank: int, group: ProcessGroup | None, max_live: int) -> None:
        super().__init__(channel=channel, rank=rank, group=group, max_live=max_live)
        self._directory = directory.absolute() / check_channel(channel)
        self._file = -1  # descriptor of the file that is being written
        self._start = 0  # bytes of its header

    def _open(
        self, what: str, version: PolicyVersion, slot: int, layout: Layout, shards: Sequence[TensorShard]
    ) -> None:
        file = self._partial(version) / WEIGHTS
        header = _header(layout)
        self._start = len(header)

        def create() -> None:
            self._remove_partials()
            file.parent.mkdir(parents=True)
            with open(file, "xb") as created:
                created.write(header)
                created.truncate(len(header) + layout.nbytes)

        self._ranks.together(what, lambda: create() if self._rank == 0 else None)
        self._file = self._ranks.together(what, lambda: os.open(file, os.O_WRONLY | os.O_CLOEXEC))

    def _place(self, slot: int, shard: TensorShard, entry: TensorEntry) -> Put:
        """Written, not mapped: a full disk is an error, not a signal."""
        dtype = getattr(torch, entry.dtype)
        shape, offset = (shard.global_shape, shard.offset) if shard.global_shape else ((1,), (0,))

        def put(row: int, rows: Tensor) -> Tensor:
            stored = rows.to("cpu", dtype).contiguous()
            content = stored.view(-1).view(torch.uint8).numpy().data
            firsts, run = _runs(tuple(stored.shape), shape, (offset[0] + row, *offset[1:]))
            nbytes = run * dtype.itemsize
            for index, first in enumerate(firsts):
                place = self._start + entry.offset + first * dtype.itemsize
                _write_all(self._file, content[index * nbytes : (index + 1) * nbytes], place)
            return stored

        return put

    def _write(self, slot: int, layout: Layout, shards: Sequence[TensorShard]) -> Tensor:
        try:
            return super()._write(slot, layout, shards)
        finally:
            # Before the ranks meet: a network filesystem shows others what was written only after the file was closed.
            os.close(self._file)

    def _seal(self, what: str, version: PolicyVersion, slot: int) -> str:
        final = self._directory / str(version)

        def seal() -> None:
            check_replaceable(final, ours=(WEIGHTS,))
            if final.exists():  # of a run before this one, in the same directory
                _remove(final)
            self._partial(version).rename(final)

        self._ranks.together(what, lambda: seal() if self._rank == 0 else None)
        return f"{SCHEME}:{final}"

    def _give_back(self) -> None:
        """Live versions stay, for whoever comes later."""
        if self._rank == 0:
            self._remove_partials()

    def release(self, version: PolicyVersion) -> None:
        """Its directory is removed."""
        super().release(version)
        if self._rank == 0:
            _remove(self._directory / str(version))

    def _partial(self, version: PolicyVersion) -> Path:
        return self._directory / f".{version}.partial"

    def _remove_partials(self) -> None:
        for left in self._directory.glob(".*.partial"):
            shutil.rmtree(left)


class FilesystemReader:
    """A generator rank's end, or anybody's: views of a version's file, read when they are looked at."""

    def tensors(self, publication: Publication) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReader`; what was read once stays good after the version is released."""
        content = _content(publication)
        return ((entry.name, entry_view(content, entry)) for entry in publication.manifest.entries)


def _runs(shape: tuple[int, ...], global_shape: tuple[int, ...], offset: tuple[int, ...]) -> tuple[Iterator[int], int]:
    """A box's contiguous runs in the whole tensor: the first element of each, and how many elements each has."""
    cut = len(shape) - 1
    while cut > 0 and shape[cut] == global_shape[cut]:
        cut -= 1
    steps = [math.prod(global_shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(at * step for at, step in zip(offset, steps, strict=True))
    firsts = (
        start + sum(at * step for at, step in zip(index, steps, strict=False))
        for index in itertools.product(*map(range, shape[:cut]))
    )
    return firsts, math.prod(shape[cut:])


def _write_all(descriptor: int, content: memoryview, place: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, place)
        content, place = content[written:], place + written


def _header(layout: Layout) -> bytes:
    """Of the safetensors file, its length included; padded so that the tensors start aligned."""
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, entry in layout.entries.items():
        tensors[name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.offset, entry.offset + entry.nbytes],
        }
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text = text.ljust(aligned(_LENGTH_BYTES + len(text), ALIGNMENT) - _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _content(publication: Publication) -> Tensor:
    """[bytes] uint8, from the first tensor on."""
    what = f"{publication.channel} {publication.version}"
    file = Path(publication.location.removeprefix(f"{SCHEME}:")) / WEIGHTS
    nbytes = publication.manifest.nbytes
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise WeightsError(f"{what} is gone: there is no {file}") from error
    try:
        size = os.fstat(descriptor).st_size
        start = _LENGTH_BYTES + int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
        if size - start < nbytes:
            raise WeightsError(f"{what}: {file} holds {max(size - start, 0)} bytes, its manifest says {nbytes}")
        # Private: nobody's write can reach the file, and reading needs no permission to write.
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)[start:]


def _remove(version: Path) -> None:
    """Invisible at once, then gone."""
    hidden = version.with_name(f".{version.name}.removed.partial")
    version.rename(hidden)
    shutil.rmtree(hidden)
