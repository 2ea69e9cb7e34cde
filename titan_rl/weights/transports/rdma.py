"""Publishes weights in the trainer ranks' own memory; generators on any host fetch it through Monarch.

RDMA where the hosts have it, Monarch's TCP otherwise. Nothing passes through an actor's mailbox.

- Every rank keeps its shards, packed, in memory that is registered once per slot and recycled.
- A generator rank fetches into memory of its own, in its engine thread, all pieces at once; every tensor-parallel rank
  fetches for itself. What it fetched last of a channel it can read again without the writer.
- A publication lives as long as the processes that wrote it. When one is dead, generators keep serving what they
  have, and reading it anew is an error; the trainer that comes after publishes again.

Monarch's calls need an actor's context: publishers and readers take the one that is current when they are made, and
may then be used in any one thread.
"""

from __future__ import annotations

import base64
import contextvars
import pickle
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from monarch.rdma import RDMAAction, RDMABuffer
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Manifest, Publication, TensorEntry
from titan_rl.weights.shards import TensorShard
from titan_rl.weights.transports.layout import Area, Layout, Put, aligned, is_written, served
from titan_rl.weights.transports.publisher import ALIGNMENT, ChannelPublisher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCHEME = "rdma"

_PIECE_BYTES = 4 << 20
"""Shards are fetched together until they are so many bytes: one operation costs 0.2 ms, and several at once are faster
than one (TCP on one host: 1.9 GB/s in pieces of 4 MB, 0.9 in one)."""
_PATIENCE_SECONDS = 10
_SLOWEST_BYTES_PER_SECOND = 50 << 20
"""A fetch that takes longer than the patience plus its bytes at this speed is an error. That is how a writer that is
gone is noticed: Monarch does not say so, and until then the engine stands still."""


@dataclass(frozen=True, slots=True)
class _Box:
    """One shard in a piece."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    """Bytes from the start of the piece."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is fetched in one operation."""

    boxes: tuple[_Box, ...]
    start: int
    """Bytes from the start of the rank's memory; on the reader's side, of all ranks' one after the other."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """Registered memory of one rank."""

    content: Tensor  # [bytes] uint8
    pieces: tuple[_Piece, ...]
    buffers: tuple[RDMABuffer, ...]


class RdmaPublisher(ChannelPublisher):
    """See `ChannelPublisher`."""

    def __init__(
        self,
        *,
        channel: str,
        rank: int,
        group: ProcessGroup | None,
        max_live: int,
        transfer_dtype: torch.dtype | None = None,
        delta: bool = False,
    ) -> None:
        super().__init__(
            channel=channel, rank=rank, group=group, max_live=max_live, transfer_dtype=transfer_dtype, delta=delta
        )
        self._context = contextvars.copy_context()
        self._slots: dict[int, _Slot] = {}

    def _open(
        self, what: str, version: PolicyVersion, slot: int, layout: Layout, shards: Sequence[TensorShard]
    ) -> Area:
        def register() -> _Slot:
            pieces, nbytes = _plan(shards, layout)
            kept = self._slots.get(slot)
            if kept is not None and kept.pieces == pieces:
                return kept
            self._forget(slot)
            content = torch.zeros(nbytes, dtype=torch.uint8)  # written here, so that its memory is really there
            buffers = self._context.run(lambda: tuple(RDMABuffer(_part(content, piece)) for piece in pieces))
            return _Slot(content, pieces, buffers)

        opened = self._slots[slot] = self._ranks.together(what, register)
        return _OwnMemory(opened.content, _places(opened.pieces))

    def _seal(self, what: str, version: PolicyVersion, slot: int, manifest: Manifest) -> str:
        mine = self._slots[slot]
        everyones = self._ranks.gather((mine.pieces, mine.buffers))
        # The same text on every rank: pickled from what was gathered, not from this rank's own objects.
        return f"{SCHEME}:{base64.b64encode(pickle.dumps(everyones)).decode()}"

    def _released(self, version: PolicyVersion) -> None:
        """The memory stays registered, to be written again."""

    def _give_back(self) -> None:
        for slot in list(self._slots):
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        old = self._slots.pop(slot, None)
        if old is not None:
            for dropped in self._context.run(lambda: [buffer.drop() for buffer in old.buffers]):
                dropped.get()


class _OwnMemory(Area):
    """This rank's shards, one after the other."""

    def __init__(self, content: Tensor, places: list[int]) -> None:
        self._content = content
        self._places = iter(places)

    def shard(self, shard: TensorShard, entry: TensorEntry) -> Put:
        start = next(self._places)
        dtype = getattr(torch, entry.stored_dtype)
        packed = self._content[start : start + shard.data.numel() * dtype.itemsize].view(dtype)
        target = packed.view(shard.data.shape or (1,))

        def put(row: int, rows: Tensor) -> Tensor:
            return target[row : row + len(rows)].copy_(rows)

        return put

    def close(self) -> None:
        """The memory stays."""


@dataclass(slots=True)
class _Fetched:
    """What a reader has of one channel."""

    location: str
    version: PolicyVersion
    pieces: list[_Piece]
    buffers: list[RDMABuffer]
    content: Tensor  # [bytes] uint8, recycled
    here: set[int] = field(default_factory=set)
    """Indices of the pieces that were fetched."""


class RdmaReader:
    """A generator rank's end: fetches what it is asked for into memory that it keeps.

    Args:
        patience_seconds: how much longer than its bytes take a fetch may take.
    """

    def __init__(self, *, patience_seconds: int = _PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._context = contextvars.copy_context()
        self._channels: dict[str, _Fetched] = {}

    def tensors(self, publication: Publication, skip: AbstractSet[str] = frozenset()) -> Iterator[tuple[str, Tensor]]:
        """See `transport.WeightReader`. Returns when everything is here; must not be called in an event loop."""
        fetched = self._channels.get(publication.channel)
        if fetched is None or (fetched.location, fetched.version) != (publication.location, publication.version):
            fetched = self._channels[publication.channel] = _announced(publication, fetched)
        wanted = {entry.name for entry in publication.manifest.entries} - skip
        self._fetch(publication, fetched, wanted)
        return _assembled(publication, fetched, wanted)

    def close(self) -> None:
        self._channels.clear()

    def _fetch(self, publication: Publication, fetched: _Fetched, wanted: set[str]) -> None:
        missing = [
            index
            for index, piece in enumerate(fetched.pieces)
            if index not in fetched.here and any(box.name in wanted for box in piece.boxes)
        ]
        if not missing:
            return

        nbytes = sum(fetched.pieces[index].nbytes for index in missing)
        seconds = self._patience_seconds + nbytes // _SLOWEST_BYTES_PER_SECOND

        def read() -> None:
            action = RDMAAction()
            for index in missing:
                action.read_remote(_part(fetched.content, fetched.pieces[index]), fetched.buffers[index])
            action.submit(timeout=seconds).get()

        try:
            self._context.run(read)
        except Exception as error:  # whatever Monarch raises about a process that is gone
            raise WeightsError(
                f"{publication.channel} {publication.version} could not be fetched from the trainer "
                f"within {seconds} s: {type(error).__name__}: {error}"
            ) from error
        fetched.here.update(missing)


def _plan(shards: Sequence[TensorShard], layout: Layout) -> tuple[tuple[_Piece, ...], int]:
    """How this rank's memory is cut into pieces, and its bytes."""
    pieces: list[_Piece] = []
    boxes: list[_Box] = []
    start = end = 0

    def finish() -> None:
        nonlocal start
        if boxes:
            pieces.append(_Piece(tuple(boxes), start, end - start))
            boxes.clear()
        start = end

    for shard in shards:
        if not is_written(shard):
            continue
        entry = layout.entries[layout.indices[shard.name]]
        itemsize = getattr(torch, entry.stored_dtype).itemsize
        boxes.append(_Box(shard.name, tuple(shard.offset), tuple(shard.data.shape), end - start))
        end += aligned(shard.data.numel() * itemsize, ALIGNMENT)
        if end - start >= _PIECE_BYTES:
            finish()
    finish()
    return tuple(pieces), end


def _places(pieces: Sequence[_Piece]) -> list[int]:
    return [piece.start + box.start for piece in pieces for box in piece.boxes]


def _part(content: Tensor, piece: _Piece) -> Tensor:
    return content[piece.start : piece.start + piece.nbytes]


def _announced(publication: Publication, before: _Fetched | None) -> _Fetched:
    """Nothing fetched yet; the memory of what was read before is used again where it is large enough."""
    everyones = pickle.loads(base64.b64decode(publication.location.removeprefix(f"{SCHEME}:")))
    pieces: list[_Piece] = []
    buffers: list[RDMABuffer] = []
    end = 0
    for theirs, their_buffers in everyones:
        pieces += [_Piece(piece.boxes, end + piece.start, piece.nbytes) for piece in theirs]
        buffers += their_buffers
        end += sum(piece.nbytes for piece in theirs)
    content = torch.empty(end, dtype=torch.uint8) if before is None or before.content.numel() < end else before.content
    return _Fetched(publication.location, publication.version, pieces, buffers, content)


def _assembled(publication: Publication, fetched: _Fetched, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors: what one rank had whole is a view, others are put together, one at a time."""
    found: dict[str, list[tuple[_Box, int]]] = {}
    for piece in fetched.pieces:
        for box in piece.boxes:
            found.setdefault(box.name, []).append((box, piece.start + box.start))
    for entry in publication.manifest.entries:
        if entry.name not in wanted:
            continue
        dtype = getattr(torch, entry.stored_dtype)
        boxes = [(box, _stored(fetched.content, box, start, dtype)) for box, start in found.get(entry.name, [])]
        if len(boxes) == 1:
            whole = boxes[0][1]
        else:
            whole = torch.empty(entry.shape, dtype=dtype)
            for box, part in boxes:
                where = zip(box.offset, box.shape, strict=True)
                whole[tuple(slice(start, start + size) for start, size in where)].copy_(part)
        yield entry.name, served(whole, entry)


def _stored(content: Tensor, box: _Box, start: int, dtype: torch.dtype) -> Tensor:
    count = 1
    for size in box.shape:
        count *= size
    return content[start : start + count * dtype.itemsize].view(dtype).view(box.shape)
