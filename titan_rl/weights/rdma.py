"""Publishes weights in the trainer ranks' own memory; generators on any host fetch it through Monarch.

RDMA where the hosts have it, Monarch's TCP otherwise. Nothing passes through an actor's mailbox.

- Every rank keeps its shards, packed, in memory that is registered once per slot and recycled.
- A generator rank fetches into memory of its own, in its engine thread, all pieces at once; every tensor-parallel rank
  fetches for itself. It can read its last publication of a channel again without the writer.
- A publication lives as long as the processes that wrote it. When one is dead, generators keep serving what they
  have, and reading it anew is an error; the trainer that comes after publishes again.

Monarch's calls need an actor's context: publishers and readers take the one that is current when they are made, and
may then be used in any one thread.
"""

from __future__ import annotations

import base64
import contextvars
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from monarch.rdma import RDMAAction, RDMABuffer
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication, TensorEntry, TensorShard
from titan_rl.weights.publisher import ALIGNMENT, ChannelPublisher, Layout, Put, aligned, box_view

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCHEME = "rdma"

_PIECE_BYTES = 4 << 20
"""Shards are fetched together until they are so many bytes: one operation costs 0.2 ms, and several at once are faster
than one (TCP on one host: 1.9 GB/s in pieces of 4 MB, 0.9 in one)."""
_PATIENCE_SECONDS = 10
_SLOWEST_BYTES_PER_SECOND = 50 << 20
"""A fetch that takes longer than the patience plus its bytes at this speed is an error. Monarch does not report a dead
writer, so this bound is how one is noticed; the engine stands still until then."""


@dataclass(frozen=True, slots=True)
class _Box:
    """One shard in a rank's memory."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    """Bytes from the start of the memory; on the reader's side, of all ranks' one after the other."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Registered memory of one rank."""

    content: Tensor  # [bytes] uint8
    boxes: dict[tuple[str, tuple[int, ...]], _Box]
    """By name and offset."""
    buffers: list[tuple[int, int, RDMABuffer]]
    """(start, end, handle) of each piece, which is fetched in one operation."""


class RdmaPublisher(ChannelPublisher):
    """See `ChannelPublisher`."""

    def __init__(self, *, channel: str, rank: int, group: ProcessGroup | None, max_live: int) -> None:
        super().__init__(channel=channel, rank=rank, group=group, max_live=max_live)
        self._context = contextvars.copy_context()
        self._slots: dict[int, _Slot] = {}

    def _open(
        self, what: str, version: PolicyVersion, slot: int, layout: Layout, shards: Sequence[TensorShard]
    ) -> None:
        def register() -> _Slot:
            boxes, pieces, nbytes = _plan(shards, layout)
            kept = self._slots.get(slot)
            if kept is not None and kept.boxes == boxes and kept.content.numel() == nbytes:
                return kept
            self._forget(slot)
            content = torch.zeros(nbytes, dtype=torch.uint8)  # written here, so that its memory is really there
            buffers = self._context.run(lambda: [(start, end, RDMABuffer(content[start:end])) for start, end in pieces])
            return _Slot(content, boxes, buffers)

        self._slots[slot] = self._ranks.together(what, register)

    def _place(self, slot: int, shard: TensorShard, entry: TensorEntry) -> Put:
        opened = self._slots[slot]
        box = opened.boxes[shard.name, tuple(shard.offset)]
        target = _typed(opened.content, box.start, box.shape or (1,), entry)
        return lambda row, rows: target[row : row + len(rows)].copy_(rows)

    def _seal(self, what: str, version: PolicyVersion, slot: int) -> str:
        mine = self._slots[slot]
        everyones = self._ranks.gather((list(mine.boxes.values()), mine.buffers))
        # The same text on every rank: pickled from what was gathered, not from this rank's own objects.
        return f"{SCHEME}:{base64.b64encode(pickle.dumps(everyones)).decode()}"

    def _give_back(self) -> None:
        for slot in list(self._slots):
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        old = self._slots.pop(slot, None)
        if old is not None:
            for dropped in self._context.run(lambda: [buffer.drop() for _, _, buffer in old.buffers]):
                dropped.get()


@dataclass(frozen=True, slots=True)
class _Fetched:
    """The last publication that a reader fetched from one channel."""

    location: str
    version: PolicyVersion
    boxes: list[_Box]
    content: Tensor  # [bytes] uint8, recycled


class RdmaReader:
    """A generator rank's end: fetches publications into memory that it keeps.

    Args:
        patience_seconds: how much longer than its bytes take a fetch may take.
    """

    def __init__(self, *, patience_seconds: int = _PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._context = contextvars.copy_context()
        self._channels: dict[str, _Fetched] = {}

    def tensors(self, publication: Publication) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReader`. Returns when everything is here; must not be called in an event loop."""
        fetched = self._channels.get(publication.channel)
        if fetched is None or (fetched.location, fetched.version) != (publication.location, publication.version):
            self._channels.pop(publication.channel, None)  # its memory is written again
            fetched = self._fetch(publication, None if fetched is None else fetched.content)
            self._channels[publication.channel] = fetched
        return _assembled(publication, fetched)

    def close(self) -> None:
        """Let go of the memory."""
        self._channels.clear()

    def _fetch(self, publication: Publication, memory: Tensor | None) -> _Fetched:
        """Everything, into `memory` where it is large enough."""
        everyones = pickle.loads(base64.b64decode(publication.location.removeprefix(f"{SCHEME}:")))
        boxes: list[_Box] = []
        reads: list[tuple[int, int, RDMABuffer]] = []
        nbytes = 0
        for theirs, buffers in everyones:
            boxes += [replace(box, start=nbytes + box.start) for box in theirs]
            reads += [(nbytes + start, nbytes + end, buffer) for start, end, buffer in buffers]
            nbytes += max((end for _, end, _ in buffers), default=0)
        content = torch.empty(nbytes, dtype=torch.uint8) if memory is None or memory.numel() < nbytes else memory
        seconds = self._patience_seconds + nbytes // _SLOWEST_BYTES_PER_SECOND

        def read() -> None:
            action = RDMAAction()
            for start, end, buffer in reads:
                action.read_remote(content[start:end], buffer)
            action.submit(timeout=seconds).get()

        try:
            self._context.run(read)
        except Exception as error:  # whatever Monarch raises about a process that is gone
            raise WeightsError(
                f"{publication.channel} {publication.version} could not be fetched from the trainer "
                f"within {seconds} s: {type(error).__name__}: {error}"
            ) from error
        return _Fetched(publication.location, publication.version, boxes, content)


def _plan(
    shards: Sequence[TensorShard], layout: Layout
) -> tuple[dict[tuple[str, tuple[int, ...]], _Box], list[tuple[int, int]], int]:
    """Where this rank's shards lie in its memory, the pieces that they are fetched in, and the bytes of all."""
    boxes: dict[tuple[str, tuple[int, ...]], _Box] = {}
    pieces: list[tuple[int, int]] = []
    start = end = 0
    for shard in shards:
        itemsize = getattr(torch, layout.entries[shard.name].dtype).itemsize
        offset = tuple(shard.offset)
        boxes[shard.name, offset] = _Box(shard.name, offset, tuple(shard.data.shape), end)
        end += aligned(shard.data.numel() * itemsize, ALIGNMENT)
        if end - start >= _PIECE_BYTES:
            pieces.append((start, end))
            start = end
    if end > start:
        pieces.append((start, end))
    return boxes, pieces, end


def _assembled(publication: Publication, fetched: _Fetched) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors: a view where one rank holds all of it, else assembled from the ranks' boxes, one at a time."""
    boxes: dict[str, list[_Box]] = {}
    for box in fetched.boxes:
        boxes.setdefault(box.name, []).append(box)
    for entry in publication.manifest.entries:
        parts = [(box, _typed(fetched.content, box.start, box.shape, entry)) for box in boxes.get(entry.name, [])]
        if len(parts) == 1:
            yield entry.name, parts[0][1]
        else:
            whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for box, part in parts:
                box_view(whole, box.offset, box.shape).copy_(part)
            yield entry.name, whole


def _typed(content: Tensor, start: int, shape: Sequence[int], entry: TensorEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    return content[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
