"""Publishing, independent of the transport: every trainer rank writes its own shards, nothing is gathered.

    publish: free slot -> all ranks store and fingerprint -> sums agree -> sealed -> Publication      release: slot free

What always holds:

- A publication exists once every rank has written everything: `publish` returns it behind the last collective. A
  rank that dies or raises half-way leaves a free slot with rubbish in it and every live publication as it was.
- The bytes of a live publication do not change. A slot is written only while it is free.
- All ranks agree: names, shapes, slot and version are compared before the first byte is written.
- Fingerprints are taken of the stored bytes, read back, in the dtype that is served.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.config import WeightsConfig
from titan_rl.weights.fingerprint import BITS, check_box, shard_fingerprint, signed, unsigned
from titan_rl.weights.manifest import Manifest, Publication, TensorEntry, TensorShard
from titan_rl.weights.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Shapes = dict[str, tuple[int, ...]]
"""Global shape of each tensor that a rank holds a part of."""
Aliases = tuple[tuple[str, str], ...]
Put = Callable[[int, Tensor], Tensor]
"""`put(row, rows)`: store these rows of a shard from its row `row` on, cast to the entry's dtype; returns them as they
were stored, good until the next call."""

ALIGNMENT = 64
"""Bytes; what tensors in memory start at a multiple of (a cache line, and what vector loads like)."""

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"

_CHUNK_BYTES = 1 << 20
"""Written and fingerprinted at a time: small enough that the fingerprint finds the bytes still in the cache (it would
cost half a copy more otherwise), large enough that the call does not matter."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of a publication lies, agreed by all ranks before anything is written."""

    entries: dict[str, TensorEntry]
    """By name, in order of name and offset; fingerprints are 0."""
    aliases: Aliases
    nbytes: int


class ChannelPublisher(ABC):
    """One trainer rank's end of a channel. All ranks call `publish`, `release` and `close` in the same order.

    Args:
        channel: names the policy among those that are published; a plain word.
        rank: of this process in `group`.
        group: the trainer's ranks; its backend must take CPU tensors. None: one rank.
        max_live: publications that may exist at once; room for that many is kept.
    """

    alignment: ClassVar[int] = ALIGNMENT
    """Bytes, of every tensor's offset."""

    def __init__(self, *, channel: str, rank: int, group: ProcessGroup | None, max_live: int) -> None:
        self._channel = channel
        self._rank = rank
        self._ranks = Ranks(group)
        self._max_live = max_live
        self._hosts: tuple[str, ...] = ()
        self._live: dict[PolicyVersion, int] = {}  # version -> slot
        self._layout: Layout | None = None
        self._layout_of: object = None
        self._closed = False

    def publish(
        self,
        version: PolicyVersion,
        shards: Iterable[TensorShard],
        *,
        dtype: torch.dtype,
        aliases: Sequence[tuple[str, str]] = (),
    ) -> Publication:
        """Store this rank's shards in a free slot, cast to `dtype`. Collective.

        Args:
            version: of these weights; not live yet.
            shards: this rank's; a rank may lack names of which it holds nothing. Those with `counted` are written.
            dtype: float32 or bfloat16, what engines compute with; fingerprints are taken after the cast.
            aliases: `(name, name of a shard)` of tensors that share another's bytes.

        Raises:
            WeightsError: on all ranks, and no version is harmed: no free slot (names the live versions), shards
                that do not cover a tensor, ranks that disagree, or too little room (says how much).
        """
        what = f"publishing {self._channel} {version}"

        def prepare() -> tuple[int, list[TensorShard], Shapes]:
            slot = self._free_slot(version)
            mine = list(shards)
            if dtype not in BITS:
                raise WeightsError(f"{dtype} is not served; served are {', '.join(map(str, BITS))}")
            return slot, mine, _shapes_of(mine)

        slot, mine, shapes = self._ranks.together(what, prepare, equal=lambda result: (version, result[0]))
        layout = self._agreed_layout(what, shapes, dtype, tuple(aliases))
        written = [shard for shard in mine if shard.counted and shard.data.numel()]
        self._open(what, version, slot, layout, written)
        sums = self._ranks.together(what, lambda: self._write(slot, layout, written))
        self._ranks.add(sums)
        manifest = _manifest(what, layout, *sums.tolist())
        location = self._seal(what, version, slot)
        self._live[version] = slot
        return Publication(
            channel=self._channel, version=version, manifest=manifest, location=location, hosts=self._hosts
        )

    def adopt(self, publications: Iterable[Publication]) -> None:
        """Take over what the ranks before left live, to release it: readers find it as it was. Call it on all
        ranks, before anything is published."""
        self._live = {each.version: self._slot_of(each, slot) for slot, each in enumerate(publications)}

    def release(self, version: PolicyVersion) -> None:
        """Nobody reads this version any more: its room may be used again. Raises WeightsError if not live."""
        if version not in self._live:
            raise WeightsError(f"{self._channel} {version} cannot be released: live are {self._live_names()}")
        del self._live[version]

    def close(self) -> None:
        """Give back what the transport holds; nothing can be published any more."""
        self._closed = True
        self._live.clear()
        self._give_back()

    @abstractmethod
    def _open(
        self, what: str, version: PolicyVersion, slot: int, layout: Layout, shards: Sequence[TensorShard]
    ) -> None:
        """Make room for this rank's shards in a free slot, invisible to readers of anything live. Collective."""

    @abstractmethod
    def _place(self, slot: int, shard: TensorShard, entry: TensorEntry) -> Put:
        """How the rows of this shard are stored."""

    @abstractmethod
    def _seal(self, what: str, version: PolicyVersion, slot: int) -> str:
        """All ranks wrote everything: the publication's location, the same on all ranks. Collective."""

    def _slot_of(self, publication: Publication, slot: int) -> int:
        """Where a publication lies that is adopted; `slot`: one for each, where that does not matter."""
        return slot

    @abstractmethod
    def _give_back(self) -> None:
        """Everything is released and nothing will be published; may be called twice."""

    def _free_slot(self, version: PolicyVersion) -> int:
        if self._closed:
            raise WeightsError("the publisher is closed")
        if version in self._live:
            raise WeightsError("this version is published already")
        used = set(self._live.values())
        for slot in range(self._max_live):
            if slot not in used:
                return slot
        raise WeightsError(f"no free segment, max_live is {self._max_live}; release one of {self._live_names()}")

    def _live_names(self) -> str:
        return ", ".join(map(str, sorted(self._live))) or "none"

    def _agreed_layout(self, what: str, shapes: Shapes, dtype: torch.dtype, aliases: Aliases) -> Layout:
        """The same layout on all ranks, of the names that any rank has. Kept for as long as no rank's names change."""
        described = (shapes, dtype, aliases)
        if self._ranks.any(self._layout_of != described):
            told = self._ranks.gather(described)
            self._layout = self._ranks.together(what, lambda: _merged_layout(told, self.alignment))
            self._layout_of = described
        assert self._layout is not None
        return self._layout

    def _write(self, slot: int, layout: Layout, shards: Sequence[TensorShard]) -> Tensor:
        """Store the shards; returns [2, entries] int64: their fingerprints, and how many elements they have."""
        sums = torch.zeros(2, len(layout.entries), dtype=torch.int64)
        fingerprints, elements = sums.numpy()  # writes through; an index into an array is cheaper than into a tensor
        indices = {name: index for index, name in enumerate(layout.entries)}
        for shard in shards:
            index = indices[shard.name]
            written = _write_shard(shard, self._place(slot, shard, layout.entries[shard.name]))
            fingerprints[index] = signed(int(fingerprints[index]) + written)
            elements[index] += shard.data.numel()
        return sums


def make_publisher(
    config: WeightsConfig, *, channel: str, rank: int, group: ProcessGroup | None, hosts: Sequence[str] = ()
) -> ChannelPublisher:
    """This rank's publisher of a channel.

    Args:
        channel: names the policy among those that are published; a plain word.
        rank: of this process in `group`.
        group: the trainer's ranks; its backend must take CPU tensors. None: one rank.
        hosts: of every rank, by rank, where there are several.

    Raises:
        ConfigError: a channel that is no plain word.
    """
    common: dict[str, Any] = {"channel": channel, "rank": rank, "group": group, "max_live": config.max_live}
    match config.transport:
        case "shared_memory":
            from titan_rl.weights.shared_memory import SharedMemoryPublisher

            return SharedMemoryPublisher(hosts=hosts, **common)
        case "filesystem":
            from titan_rl.weights.filesystem import FilesystemPublisher

            return FilesystemPublisher(directory=Path(config.directory), **common)


def publish_checkpoint(directory: Path, publisher: ChannelPublisher, *, dtype: torch.dtype) -> Publication:
    """Publish the weights of a Hugging Face directory as version v0.

    Args:
        publisher: of one rank.
        dtype: what the engines compute with.

    Raises:
        WeightsError: there are no weights, or a file is damaged.
    """
    tied = bool(json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False))
    shards = [each for each in shards_of_files(directory) if not (tied and each.name == _LM_HEAD)]
    if not shards:
        raise WeightsError(f"{directory} has no weights (*.safetensors)")
    aliases = ((_LM_HEAD, _EMBEDDING),) if tied else ()
    return publisher.publish(PolicyVersion(0, 0), shards, dtype=dtype, aliases=aliases)


def aligned(nbytes: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def entry_view(content: Tensor, entry: TensorEntry) -> Tensor:
    """The published tensor in the bytes of a publication."""
    piece = content[entry.offset : entry.offset + entry.nbytes]
    return piece.view(getattr(torch, entry.dtype)).view(entry.shape)


def box_view(whole: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The place of a box in the whole tensor."""
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def _shapes_of(shards: Iterable[TensorShard]) -> Shapes:
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


def _merged_layout(told: list[tuple[Shapes, torch.dtype, Aliases]], alignment: int) -> Layout:
    """One layout from what every rank has; the same on each, because all are told the same."""
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
    entries = {}
    offset = 0
    for name, shape in sorted(shapes.items()):
        nbytes = math.prod(shape) * dtype.itemsize
        text = str(dtype).removeprefix("torch.")
        entries[name] = TensorEntry(name=name, shape=shape, dtype=text, offset=offset, nbytes=nbytes, fingerprint=0)
        offset += aligned(nbytes, alignment)
    return Layout(entries, aliases, nbytes=offset)


def _manifest(what: str, layout: Layout, fingerprints: list[int], elements: list[int]) -> Manifest:
    """The manifest once all is written; `elements` were written of each entry, over all ranks."""
    entries = []
    gaps = []
    for entry, fingerprint, written in zip(layout.entries.values(), fingerprints, elements, strict=True):
        if written != math.prod(entry.shape):
            gaps.append(f"{written} of {math.prod(entry.shape)} elements of {entry.name}")
        entries.append(replace(entry, fingerprint=unsigned(fingerprint)))
    if gaps:
        raise WeightsError(f"{what}: the ranks' shards hold {', '.join(gaps)}")
    return Manifest(entries=tuple(entries), aliases=layout.aliases, nbytes=layout.nbytes)


def _write_shard(shard: TensorShard, put: Put) -> int:
    """Store a shard and return its fingerprint, a cacheful at a time."""
    source, shape, offset = shard.data.detach(), shard.global_shape, shard.offset
    if not shape:
        source, shape, offset = source.reshape(1), (1,), (0,)
    rows = max(1, _CHUNK_BYTES * len(source) // (source.numel() * source.itemsize))
    fingerprint = 0
    for row in range(0, len(source), rows):
        fingerprint += shard_fingerprint(put(row, source[row : row + rows]), shape, (offset[0] + row, *offset[1:]))
    return fingerprint


def shards_of_files(directory: Path) -> Iterator[TensorShard]:
    """The tensors of all `*.safetensors` in a directory. Raises WeightsError for one that cannot be read."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as tensors:
                for name in tensors.keys():
                    data = tensors.get_tensor(name)
                    shape = tuple(data.shape)
                    yield TensorShard(name=name, data=data, global_shape=shape, offset=(0,) * data.ndim)
        except Exception as error:  # the library's own error type, or an OSError
            raise WeightsError(f"{file} cannot be read: {error}") from error
