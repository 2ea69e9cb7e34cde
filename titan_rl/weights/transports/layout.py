"""Where each tensor of a publication lies, agreed by all ranks, and how one rank's shards get there.

A transport gives an `Area`; what is fingerprinted is what the area stored, read back from where it was put and in the
dtype that is served, so a rounding on the way is part of the fingerprint and not a surprise for the engine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.weights.fingerprint import check_box, shard_fingerprint, signed, unsigned
from titan_rl.weights.manifest import Manifest, TensorEntry
from titan_rl.weights.shards import TensorShard

Shapes = dict[str, tuple[int, ...]]
"""Global shape of each tensor that a rank holds a part of."""
Aliases = tuple[tuple[str, str], ...]
Put = Callable[[int, Tensor], Tensor]
"""`put(row, rows)`: store these rows of a shard from its row `row` on, cast to the entry's stored dtype; returns them
as they were stored, good until the next call."""

_CHUNK_BYTES = 1 << 20
"""Written and fingerprinted at a time: small enough that the fingerprint finds the bytes still in the cache (it would
cost half a copy more otherwise), large enough that the call does not matter."""


class Area(ABC):
    """Where one rank writes its shards of one publication."""

    @abstractmethod
    def shard(self, shard: TensorShard, entry: TensorEntry) -> Put:
        """How the rows of this shard are stored; shards come in the order in which they were given."""

    @abstractmethod
    def close(self) -> None:
        """This rank wrote everything, or failed."""


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a publication before anything is written."""

    entries: tuple[TensorEntry, ...]
    """By name and offset; fingerprints are 0."""
    indices: dict[str, int]
    aliases: Aliases
    nbytes: int

    def manifest(self, what: str, fingerprints: list[int], elements: list[int]) -> Manifest:
        """The manifest once all is written; `elements` were written of each entry, over all ranks."""
        entries = []
        gaps = []
        for entry, fingerprint, written in zip(self.entries, fingerprints, elements, strict=True):
            if written != math.prod(entry.shape):
                gaps.append(f"{written} of {math.prod(entry.shape)} elements of {entry.name}")
            entries.append(replace(entry, fingerprint=unsigned(fingerprint)))
        if gaps:
            raise WeightsError(f"{what}: the ranks' shards hold {', '.join(gaps)}")
        return Manifest(entries=tuple(entries), aliases=self.aliases, nbytes=self.nbytes)


def shapes_of(shards: Iterable[TensorShard]) -> Shapes:
    """Raises WeightsError for a shard outside its tensor or a name with two shapes."""
    shapes: Shapes = {}
    for shard in shards:
        shape = tuple(shard.global_shape)
        if shapes.setdefault(shard.name, shape) != shape:
            raise WeightsError(f"{shard.name} comes as {shapes[shard.name]} and as {shape}")
        try:
            check_box(shard.data.shape, shape, shard.offset)
        except WeightsError as error:
            raise WeightsError(f"{shard.name}: {error}") from None
    return shapes


def merged_layout(
    told: list[tuple[Shapes, torch.dtype, Aliases]], *, stored: torch.dtype, alignment: int | None
) -> Layout:
    """One layout from what every rank has; the same on each, because all are told the same.

    Args:
        told: of each rank its shapes, the dtype to be served, the aliases.
        stored: dtype of the published bytes.
        alignment: of every tensor's offset, bytes; None: tensors follow each other without gaps.
    """
    shapes: Shapes = {}
    _, dtype, aliases = told[0]
    for rank, (theirs, their_dtype, their_aliases) in enumerate(told):
        if (their_dtype, their_aliases) != (dtype, aliases):
            raise WeightsError(f"rank {rank} serves {their_dtype} {their_aliases}, rank 0 {dtype} {aliases}")
        for name, shape in theirs.items():
            if shapes.setdefault(name, shape) != shape:
                raise WeightsError(f"{name} is {shape} on rank {rank} and {shapes[name]} on a lower one")
    if not shapes:
        raise WeightsError("there are no tensors")
    for alias, name in aliases:
        if alias in shapes or name not in shapes:
            raise WeightsError(f"alias {alias} of {name}: the first must be no tensor of its own, the second one")
    entries = []
    offset = 0
    for name in sorted(shapes):
        nbytes = math.prod(shapes[name]) * stored.itemsize
        entries.append(
            TensorEntry(
                name=name,
                shape=shapes[name],
                dtype=_name(dtype),
                offset=offset,
                nbytes=nbytes,
                fingerprint=0,
                stored="" if stored == dtype else _name(stored),
            )
        )
        offset += nbytes if alignment is None else aligned(nbytes, alignment)
    indices = {entry.name: index for index, entry in enumerate(entries)}
    return Layout(tuple(entries), indices, aliases, nbytes=offset)


def aligned(nbytes: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def write_shards(shards: list[TensorShard], layout: Layout, area: Area) -> Tensor:
    """Store the counted shards; returns [2, entries] int64: their fingerprints, and how many elements they have."""
    sums = torch.zeros(2, len(layout.entries), dtype=torch.int64)
    fingerprints, elements = sums.numpy()  # writes through; an index into an array is cheaper than into a tensor
    try:
        for shard in shards:
            if not is_written(shard):
                continue
            index = layout.indices[shard.name]
            entry = layout.entries[index]
            written = _write_shard(shard, entry, area.shard(shard, entry))
            fingerprints[index] = signed(int(fingerprints[index]) + written)
            elements[index] += shard.data.numel()
    finally:
        area.close()
    return sums


def is_written(shard: TensorShard) -> bool:
    """Whether this rank stores the shard: replicas and empty ones are not."""
    return shard.counted and shard.data.numel() > 0


def box_view(whole: Tensor, shard: TensorShard) -> Tensor:
    """The shard's place in the whole tensor; at least one-dimensional, as `put` counts in rows."""
    if not shard.global_shape:
        return whole.reshape(1)
    return whole[tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.data.shape, strict=True))]


def entry_view(content: Tensor, entry: TensorEntry) -> Tensor:
    """The published tensor, as it is stored, in the bytes of a publication."""
    piece = content[entry.offset : entry.offset + entry.nbytes]
    return piece.view(getattr(torch, entry.stored_dtype)).view(entry.shape)


def served(tensor: Tensor, entry: TensorEntry) -> Tensor:
    """A stored tensor in the dtype that is served: itself, or a wider copy."""
    return tensor.to(getattr(torch, entry.dtype))


def _write_shard(shard: TensorShard, entry: TensorEntry, put: Put) -> int:
    """Store a shard and return its fingerprint, a cacheful at a time."""
    source, shape, offset = shard.data.detach(), shard.global_shape, shard.offset
    if not shape:
        source, shape, offset = source.reshape(1), (1,), (0,)
    stored_itemsize = getattr(torch, entry.stored_dtype).itemsize
    rows = max(1, _CHUNK_BYTES * len(source) // (source.numel() * stored_itemsize))
    fingerprint = 0
    for row in range(0, len(source), rows):
        stored = put(row, source[row : row + rows])
        fingerprint += shard_fingerprint(served(stored, entry), shape, (offset[0] + row, *offset[1:]))
    return fingerprint


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
