"""Publishes weights in shared memory: all ranks of a host write their shards into one mapping, nothing is gathered.

    publish: free slot -> all ranks store and fingerprint -> sums agree -> Publication      release: slot free

What always holds:

- A publication exists once every rank has written everything: `publish` returns it behind the last collective. A
  rank that dies or raises half-way leaves a free slot with rubbish in it and every live publication as it was.
- The bytes of a live publication do not change. A slot is written only while it is free.
- All ranks agree: names, shapes, slot and version are compared before the first byte is written.
- Fingerprints are taken in the dtype that is served: on the CPU of the stored bytes, read back; on CUDA of the cast
  tensors before they cross to the host, so that readers find damage on the way.

A slot is a segment: a file in shared memory, which is recycled. A fresh one costs the time of eight copies, because the
kernel has to find and clear it. A trainer over several hosts ends a publication with the same bytes in a segment of
each.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.errors import StorageError, WeightsError
from titan_rl.processes import HOST
from titan_rl.types import PolicyVersion
from titan_rl.weights.adapters import adapted
from titan_rl.weights.fingerprint import shard_sum, sums_by_name
from titan_rl.weights.manifest import LM_HEAD, TIED, Manifest, Publication, TensorEntry, TensorShard
from titan_rl.weights.ranks import Ranks
from titan_rl.weights.segment_files import DIRECTORY, create_segment, map_tensor, segment_at, segment_location
from titan_rl.weights.tensor_files import shards_of_files

Shapes = dict[str, tuple[int, ...]]
"""Global shape of each tensor that a rank holds a part of."""

ALIGNMENT = 64
"""Bytes; what tensors start at a multiple of (a cache line, and what vector loads like)."""

_PIECE_BYTES = 16 << 20
"""That a host sends to the others at a time, or one row: enough for a link's speed, little enough to be held for each
of some ten hosts."""

_Box = tuple[str, tuple[slice, ...]]
"""Name of a tensor, index into it."""


class SharedMemoryPublisher:
    """One trainer rank's end of a channel. All ranks call `publish`, `release` and `close` in the same order.

    Args:
        channel: names the policy among those that are published; a plain word.
        rank: of this process in `group`, which is as in `Ranks`.
        max_live: publications that may exist at once; room for that many is kept.
        hosts: of every rank, by rank, where there are several; the first rank of a host makes and removes its files.
        directory: of the files, on every host.
    """

    def __init__(
        self,
        *,
        channel: str,
        rank: int,
        group: dist.ProcessGroup | None,
        max_live: int,
        hosts: Sequence[str] = (),
        directory: Path = DIRECTORY,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._ranks = Ranks(group)
        self._max_live = max_live
        self._hosts = tuple(dict.fromkeys(hosts)) or (os.environ.get(HOST, "host0"),)
        self._is_first = rank == (hosts.index(hosts[rank]) if hosts else 0)
        self._exchange = HostExchange(rank, self._ranks, hosts) if len(self._hosts) > 1 else None
        self._locations = [segment_location(directory, channel, slot) for slot in range(max_live)]
        self._mapped: dict[int, Tensor] = {}  # slot -> its bytes
        self._live: dict[PolicyVersion, int] = {}  # version -> slot
        self._closed = False

    def publish(
        self,
        version: PolicyVersion,
        shards: Iterable[TensorShard],
        *,
        dtype: torch.dtype,
        aliases: Sequence[tuple[str, str]] = (),
        base: Sequence[TensorShard] | None = None,
    ) -> Publication:
        """Store this rank's shards in a free slot, cast to `dtype`. Collective. Raises WeightsError on all ranks, and
        no version is harmed: no free slot (names the live versions), shards that do not cover a tensor, ranks that
        disagree, or too little room (says how much).

        Args:
            shards: this rank's; a rank may lack names of which it holds nothing. Those with `counted` are written.
            dtype: float32 or bfloat16, what engines compute with; fingerprints are taken after the cast.
            aliases: `(name, name of a shard)` of tensors that share another's bytes.
            base: this rank's shards of the weights that LoRA adapts. Then `shards` are the adapters, whole and the same
                on all ranks; they are stored in float32, and engines compute with what they make of the base.
        """
        what = f"publishing {self._channel} {version}"
        slot, mine = self._ranks.together(what, lambda: (self._free_slot(version), list(shards)))
        shapes = [{shard.name: tuple(shard.global_shape) for shard in part} for part in (mine, base or ())]
        versions, everyones, bases = zip(*self._ranks.gather(((version, slot), *shapes)), strict=True)
        if len({*versions}) > 1:
            raise WeightsError(f"{what}: the ranks disagree on the version and its slot: {[*versions]}")
        stored = dtype if base is None else torch.float32
        layout = self._ranks.together(what, lambda: _merged_layout(everyones, stored, tuple(aliases)))
        written = [shard for shard in mine if shard.counted and shard.data.numel()]
        served: tuple[TensorEntry, ...] = ()
        if base is not None:
            adapters = {shard.name: shard.data for shard in mine}
            whole = self._ranks.together(what, lambda: _merged_layout(bases, dtype, ()))
            made = (replace(each, data=adapted(each, adapters, dtype)[()].to(dtype)) for each in base if each.counted)
            served = _written(self._ranks, what, None, whole, made).entries
            written = written if self._rank == 0 else []
        segment = self._open(what, slot, layout)
        manifest = replace(_written(self._ranks, what, segment, layout, written), served=served)
        if self._exchange is not None:
            self._exchange.complete(what, segment, layout, written)
        self._live[version] = slot
        location = self._locations[slot]
        return Publication(
            channel=self._channel, version=version, manifest=manifest, location=location, hosts=self._hosts
        )

    def adopt(self, publications: Iterable[Publication]) -> None:
        """Take over what the ranks before left live, to release it. Call it on all ranks, before anything is
        published."""
        self._live = {each.version: self._locations.index(each.location) for each in publications}

    def release(self, version: PolicyVersion) -> None:
        """Nobody reads this version any more: its room may be used again. Raises WeightsError if not live."""
        if version not in self._live:
            raise WeightsError(f"{self._channel} {version} cannot be released: live are {self._live_names()}")
        del self._live[version]

    def close(self) -> None:
        """Remove the files; nothing can be published any more. Mappings of readers stay valid."""
        self._closed = True
        self._live.clear()
        self._mapped.clear()
        if self._is_first:
            for location in self._locations:
                segment_at(location).unlink(missing_ok=True)

    def _open(self, what: str, slot: int, layout: Manifest) -> Tensor:
        """The bytes of a slot; its file is made or replaced where it is missing or too small (on all ranks alike)."""
        mapped, path = self._mapped.get(slot), segment_at(self._locations[slot])
        nbytes = max(layout.nbytes, ALIGNMENT)  # an empty file cannot be mapped
        if mapped is None or mapped.numel() < nbytes:
            self._mapped.pop(slot, None)
            self._ranks.together(what, lambda: _create(path, nbytes) if self._is_first else None)
            mapped = self._mapped[slot] = self._ranks.together(what, lambda: map_tensor(path)[0])
        return mapped

    def _free_slot(self, version: PolicyVersion) -> int:
        if self._closed:
            raise WeightsError("the publisher is closed")
        if version in self._live:
            raise WeightsError("this version is published already")
        if not (free := set(range(self._max_live)) - set(self._live.values())):
            raise WeightsError(f"no free segment, max_live is {self._max_live}; release one of {self._live_names()}")
        return min(free)

    def _live_names(self) -> str:
        return ", ".join(map(str, sorted(self._live))) or "none"


class HostExchange:
    """Completes a publication on every host of a trainer that spans several: a host gets from the others what it lacks.

    The ranks of a host share its segment, so one rank per host, the first, sends what all of them wrote. A host's link
    carries less than one copy in each direction. All ranks make it, and call `complete`, in the same order.
    """

    def __init__(self, rank: int, ranks: Ranks, hosts: Sequence[str]) -> None:
        self._ranks = ranks
        self._rank = rank
        self._hosts = hosts
        self._firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        self._group = dist.new_group(self._firsts, backend="gloo")

    def complete(self, what: str, segment: Tensor, layout: Manifest, written: Sequence[TensorShard]) -> None:
        """Returns when every host's segment has everything. This rank has written these shards, all ranks theirs."""
        of_hosts: dict[str, list[_Box]] = {}
        everyones = self._ranks.gather([(shard.name, shard.slices) for shard in written])
        for host, boxes in zip(self._hosts, everyones, strict=True):
            of_hosts.setdefault(host, []).extend(boxes)
        pieces = [_pieces(segment, layout, boxes) for boxes in of_hosts.values()]
        self._ranks.together(what, lambda: self._exchange(pieces))

    def _exchange(self, of_hosts: Sequence[Iterator[Tensor]]) -> None:
        """Every host's first rank sends its next piece, all at the same time, until there are no more."""
        if self._rank not in self._firsts:
            return
        for pieces in itertools.zip_longest(*of_hosts):
            under_way = []
            for first, piece in zip(self._firsts, pieces, strict=True):
                if piece is not None:
                    buffer = piece.contiguous() if first == self._rank else torch.empty(piece.shape, dtype=piece.dtype)
                    content = buffer.view(-1).view(torch.uint8)
                    under_way.append((piece, buffer, dist.broadcast(content, first, group=self._group, async_op=True)))
            for piece, buffer, work in under_way:
                work.wait()
                piece.copy_(buffer)


def publish_checkpoint(directory: Path, publisher: SharedMemoryPublisher, *, dtype: torch.dtype) -> Publication:
    """Publish the weights of a Hugging Face directory as version v0. Raises WeightsError if a file is damaged."""
    tied = bool(json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False))
    shards = [each for each in shards_of_files(directory) if not (tied and each.name == LM_HEAD)]
    return publisher.publish(PolicyVersion(0, 0), shards, dtype=dtype, aliases=TIED if tied else ())


def _merged_layout(everyones: Sequence[Shapes], dtype: torch.dtype, aliases: tuple[tuple[str, str], ...]) -> Manifest:
    """Where everything lies, from what every rank has; fingerprints are 0."""
    shapes: Shapes = {}
    for rank, theirs in enumerate(everyones):
        for name, shape in theirs.items():
            if shapes.setdefault(name, shape) != shape:
                raise WeightsError(f"{name} is {shape} on rank {rank} and {shapes[name]} on a lower one")
    if not shapes:
        raise WeightsError("there are no tensors")
    entries = []
    offset = 0
    text = str(dtype).removeprefix("torch.")
    for name, shape in sorted(shapes.items()):
        nbytes = math.prod(shape) * dtype.itemsize
        entries.append(TensorEntry(name=name, shape=shape, dtype=text, offset=offset, nbytes=nbytes, fingerprint=0))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Manifest(entries=tuple(entries), aliases=aliases, nbytes=offset)


def _create(path: Path, nbytes: int) -> None:
    try:
        create_segment(path, nbytes)
    except StorageError as error:
        raise WeightsError(f"{error} or lower weights.max_live") from error


def _store_from_device(part: Tensor, place: Tensor) -> Tensor:
    """Half of the bytes cross if they are cast first. Nothing is waited for where the place is in one piece."""
    served = part.to(place.dtype)
    place.copy_(served, non_blocking=place.is_contiguous())
    return served


_WAYS: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
    # Small enough that the fingerprint finds the bytes still in the last cache, large enough that the calls, 40 µs
    # each, do not matter (they took a third of a copy at 1 MiB).
    "cpu": (4 << 20, lambda part, place: place.copy_(part)),
    "cuda": (256 << 20, _store_from_device),  # bounds the memory for the cast
}
"""By type of device: bytes written at a time; what writes them, and returns what to take the fingerprint of."""


def _written(
    ranks: Ranks, what: str, segment: Tensor | None, layout: Manifest, shards: Iterable[TensorShard]
) -> Manifest:
    """Store the shards, where there is a segment; returns the layout with the fingerprints of these and of the other
    ranks'. Collective."""
    entries = {entry.name: entry for entry in layout.entries}

    def parts() -> Iterator[tuple[str, Tensor, int]]:
        for shard in shards:
            if segment is None:
                total = shard_sum(shard.data, shard.global_shape, shard.offset)
            else:
                total = _write_shard(shard, entries[shard.name].view(segment))
            yield shard.name, total, shard.data.numel()

    # To read the sums is to wait for the copies, which were queued before.
    sums = ranks.together(what, lambda: sums_by_name(entries, parts()))
    ranks.add(sums)
    found = list(zip(layout.entries, *sums.tolist(), strict=True))
    if gaps := [each for each in found if each[2] != math.prod(each[0].shape)]:
        missing = (f"{count} of {math.prod(entry.shape)} elements of {entry.name}" for entry, _, count in gaps)
        raise WeightsError(f"{what}: the ranks' shards hold {', '.join(missing)}")
    return replace(layout, entries=tuple(replace(entry, fingerprint=each) for entry, each, _ in found))


def _write_shard(shard: TensorShard, whole: Tensor) -> Tensor:
    """Store a shard in its tensor and return its fingerprint (`shard_sum`), a chunk at a time."""
    source, target, shape, offset = shard.data.detach(), whole[shard.slices], shard.global_shape, shard.offset
    if not shape:
        source, target, shape, offset = source.reshape(1), target.reshape(1), (1,), (0,)
    chunk_bytes, store = _WAYS[source.device.type]
    rows = max(1, chunk_bytes * len(source) // source.nbytes)
    fingerprint = torch.zeros((), dtype=torch.int64, device=source.device)
    for row in range(0, len(source), rows):
        stored = store(source[row : row + rows], target[row : row + rows])
        fingerprint += shard_sum(stored, shape, (offset[0] + row, *offset[1:]))
    return fingerprint


def _pieces(segment: Tensor, layout: Manifest, boxes: Sequence[_Box]) -> Iterator[Tensor]:
    """The boxes as views of the publication, cut by rows where one is large."""
    entries = {entry.name: entry for entry in layout.entries}
    for name, index in boxes:
        box = entries[name].view(segment)[index]
        box = box if box.ndim else box.reshape(1)
        yield from box.split(max(1, _PIECE_BYTES * len(box) // box.nbytes))
