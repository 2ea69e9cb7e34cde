"""A copy of a trainer rank's state in shared memory. If the rank dies, its successor goes on from it, bit for bit.

    step 4 ─▶ slot 0    step 5 ─▶ slot 1    step 6 ─▶ slot 0    …        reference policy ─▶ slot 2, once

- Two slots take turns, so the copy of the step before is whole while the next one is being made. It is also the one
  that is wanted if a step was finished, but its rank died before it could say so.
- A copy is sealed last, with version and checksum. One that is torn, damaged or of another layout is recognised.
- Only the same rank of the same layout reads it: the bytes are those of its shards, in their order.
- Memory is kept, also by a successor: touching new pages takes as long as eight copies. On CUDA its pages are locked.
"""

import math
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from titan_rl.errors import CheckpointError, StorageError
from titan_rl.types import PolicyVersion
from titan_rl.weights.ranks import Ranks
from titan_rl.weights.segment_files import DIRECTORY, create_segment, map_tensor, segment_path

LARGEST_SHARE = 0.5
"""Of the free shared memory that the copies of all ranks may take. What is left is at least as much, and publications
need less: at most 4 bytes per parameter each, where copies take 24."""

_REFERENCE = 2
"""The slot of the reference policy."""

_SEAL = struct.Struct("<QQQQ")  # mark, incarnation, step, checksum
_MARK = 0x7469_7461_6E5F_726C
_ALIGNMENT = 64
"""Bytes; of the seal, and of what each tensor starts at a multiple of."""

_BATCH_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Copied and hashed at a time, by device: on a CPU the checksum finds the bytes in the cache, and from a device each
copy waits for its end."""

MOST_FROM_DEVICE = 8 << 30
"""Bytes of one rank's state on a device, beyond which no copies are kept: every step would wait seconds for them."""


class StateCopies:
    """The copies of one rank. `owner_pid`: process whose death makes the files rubbish (see `segment_files`). `ranks`:
    of the trainer, on this host; each has as much to copy."""

    def __init__(self, *, owner_pid: int, rank: int, ranks: int, directory: Path = DIRECTORY) -> None:
        self._paths = [segment_path(directory, owner_pid, f"state.{rank}", slot) for slot in range(3)]
        self._here = ranks
        self._mapped: dict[int, Tensor] = {}  # slot -> its bytes

    def write(self, version: PolicyVersion, state: Sequence[Tensor], reference: Sequence[Tensor] = ()) -> None:
        """Copy this rank's tensors after a step, and those of the reference policy if it is new. Raises StorageError if
        there is no room."""
        from_device = sum(tensor.nbytes for tensor in state if tensor.device.type != "cpu")
        if from_device > MOST_FROM_DEVICE:
            raise StorageError(
                f"every step would wait until {from_device / 2**30:.0f} GiB of each rank were copied from its device"
            )
        sizes = {0: _nbytes(state), 1: _nbytes(state)} | ({_REFERENCE: _nbytes(reference)} if reference else {})
        self._make_room({slot: nbytes for slot, nbytes in sizes.items() if not self._is_mapped(slot, nbytes)})
        if reference:
            self._write(_REFERENCE, PolicyVersion(version.incarnation, 0), reference)
        self._write(version.step % 2, version, state)

    def read(self, version: PolicyVersion, state: Sequence[Tensor], reference: Sequence[Tensor] = ()) -> None:
        """Fill these tensors with the copy of a version. Collective. Raises CheckpointError, on all ranks and with
        nothing changed, if a rank has no usable copy of it."""
        parts = [(version.step % 2, version, state), (_REFERENCE, PolicyVersion(version.incarnation, 0), reference)]
        parts = [part for part in parts if part[2]]
        reason = next(filter(None, (self._why_unusable(*part) for part in parts)), "")
        reasons = Ranks(dist.group.WORLD).gather(reason)
        if any(reasons):
            raise CheckpointError("; ".join(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why))
        for slot, _, tensors in parts:
            for pieces, places, _ in _batches(tensors, self._mapped[slot]):
                torch._foreach_copy_(pieces, places)

    def remove(self) -> None:
        self._mapped.clear()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _make_room(self, missing: dict[int, int]) -> None:
        directory = self._paths[0].parent
        if (needed := sum(missing.values()) * self._here) > (free := shutil.disk_usage(directory).free) * LARGEST_SHARE:
            raise StorageError(
                f"{needed / 2**20:.0f} MiB, for two copies of every rank's state, are more than half of the "
                f"{free / 2**20:.0f} MiB that are free in {directory}"
            )
        for slot, nbytes in missing.items():
            self._mapped.pop(slot, None)
            create_segment(self._paths[slot], nbytes)
            self._is_mapped(slot, nbytes)

    def _is_mapped(self, slot: int, nbytes: int) -> bool:
        """Map the slot's file, if there is one of this size."""
        if slot not in self._mapped:
            try:
                self._mapped[slot] = map_tensor(self._paths[slot])[0]
            except FileNotFoundError:
                return False
        return self._mapped[slot].numel() == nbytes

    def _write(self, slot: int, version: PolicyVersion, tensors: Sequence[Tensor]) -> None:
        content = self._mapped[slot]
        _SEAL.pack_into(content.numpy().data, 0, 0, 0, 0, 0)
        checksum = _begin(version, tensors)
        for pieces, places, stored in _batches(tensors, content):
            torch._foreach_copy_(places, pieces)
            checksum.update(stored)
        _SEAL.pack_into(content.numpy().data, 0, _MARK, version.incarnation, version.step, checksum.intdigest())

    def _why_unusable(self, slot: int, version: PolicyVersion, tensors: Sequence[Tensor]) -> str:
        path = self._paths[slot]
        try:
            if not self._is_mapped(slot, _nbytes(tensors)):
                return f"there is no copy at {path}"
        except StorageError as error:  # the other ranks wait for this one's answer
            return str(error)
        content = self._mapped[slot]
        mark, incarnation, step, sealed = _SEAL.unpack_from(content.numpy().data)
        if mark != _MARK:
            return f"the copy at {path} is torn"
        if (found := PolicyVersion(incarnation, step)) != version:
            return f"the copy at {path} is of {found}, not of {version}"
        checksum = _begin(version, tensors)
        for _, _, stored in _batches(tensors, content):
            checksum.update(stored)
        return "" if checksum.intdigest() == sealed else f"the copy at {path} is damaged (checksum)"


def _begin(version: PolicyVersion, tensors: Sequence[Tensor]) -> Any:
    """A checksum that begins with the version and the layout."""
    layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    return xxhash.xxh3_64(repr((version.incarnation, version.step, layout)).encode())


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return _ALIGNMENT + sum(map(_room_of, tensors))


def _room_of(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT


def _batches(tensors: Sequence[Tensor], content: Tensor) -> Iterator[tuple[list[Tensor], list[Tensor], memoryview]]:
    """A cacheful at a time: pieces of tensors, their places in a slot, and the bytes that the places make up."""
    stored = content.numpy().data
    pieces: list[Tensor] = []
    places: list[Tensor] = []
    begin = end = start = _ALIGNMENT
    for tensor in tensors:
        live = tensor.detach() if tensor.ndim else tensor.detach().reshape(1)
        place = content[start : start + live.nbytes].view(live.dtype).view(live.shape)
        end, start = start, start + _room_of(live)
        most = _BATCH_BYTES["cpu" if live.device.type == "cpu" else "cuda"]
        rows = max(1, most * len(live) // max(1, live.nbytes))
        for piece, where in zip(live.split(rows), place.split(rows), strict=True):
            pieces.append(piece)
            places.append(where)
            end += piece.nbytes
            if end - begin >= most:
                yield pieces, places, stored[begin:end]
                pieces, places, begin = [], [], end
    yield pieces, places, stored[begin:]
