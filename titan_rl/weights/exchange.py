"""Completes a publication on every host of a trainer that spans several: a host gets from the others what it lacks.

The ranks of a host share its segment, so one rank per host, the first, sends what all of them wrote. A host's link
carries in each direction what the other hosts' ranks have, or its own do: less than one copy. Nothing holds more than a
round's bytes of each host besides the segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.weights.manifest import TensorEntry, TensorShard
from titan_rl.weights.ranks import Ranks

_ROUND_BYTES = 16 << 20
"""That a host sends at a time: enough for a link's speed, little enough to be held for each of some ten hosts."""

_Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, offset, shape."""


class HostExchange:
    """One rank's end. All ranks make it, and call `complete`, in the same order.

    Args:
        rank: of this process in the default process group.
        ranks: that group's.
        hosts: of every rank, by rank.
    """

    def __init__(self, rank: int, ranks: Ranks, hosts: Sequence[str]) -> None:
        self._ranks = ranks
        self._hosts = hosts
        self._firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        self._me = self._firsts.index(rank) if rank in self._firsts else None
        self._group = dist.new_group(self._firsts, backend="gloo")

    def complete(
        self, what: str, content: Tensor, entries: Mapping[str, TensorEntry], written: Sequence[TensorShard]
    ) -> None:
        """Returns when every host has everything. All ranks have written their shards.

        Args:
            content: of this host's segment.
            written: by this rank.
        """
        boxes: list[_Box] = [(each.name, tuple(each.offset), tuple(each.data.shape)) for each in written]
        everyones = self._ranks.gather(boxes)
        of_hosts = [
            [box for rank, theirs in enumerate(everyones) if self._hosts[rank] == self._hosts[first] for box in theirs]
            for first in self._firsts
        ]
        self._ranks.together(what, lambda: self._exchange(content, entries, of_hosts))

    def _exchange(self, content: Tensor, entries: Mapping[str, TensorEntry], of_hosts: list[list[_Box]]) -> None:
        if self._me is None:
            return
        rounds = [list(_rounds(boxes, entries)) for boxes in of_hosts]
        packed = [torch.empty(_ROUND_BYTES, dtype=torch.uint8) for _ in of_hosts]
        mine = torch.empty(_ROUND_BYTES, dtype=torch.uint8)
        for turn in range(max(map(len, rounds))):
            views = [
                list(_views(buffer, content, entries, parts[turn] if turn < len(parts) else []))
                for buffer, parts in zip((*packed, mine), (*rounds, rounds[self._me]), strict=True)
            ]
            for place, whole in views.pop():
                place.copy_(whole)
            dist.all_gather(packed, mine, group=self._group)
            for host, theirs in enumerate(views):
                if host != self._me:
                    for place, whole in theirs:
                        whole.copy_(place)


def _rounds(boxes: Sequence[_Box], entries: Mapping[str, TensorEntry]) -> Iterator[list[_Box]]:
    """All boxes, cut where one is larger than a round, in rounds."""
    parts: list[_Box] = []
    nbytes = 0
    for name, offset, shape in boxes:
        itemsize = getattr(torch, entries[name].dtype).itemsize
        for part_offset, part_shape in _cut(offset, shape, _ROUND_BYTES // itemsize):
            size = math.prod(part_shape) * itemsize
            if nbytes + size > _ROUND_BYTES:
                yield parts
                parts, nbytes = [], 0
            parts.append((name, part_offset, part_shape))
            nbytes += size
    yield parts


def _cut(
    offset: tuple[int, ...], shape: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of parts of a box, with at most so many elements each."""
    if math.prod(shape) <= most:
        yield offset, shape
        return
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    rows = max(1, most // math.prod(shape[dim + 1 :]))
    for first in range(0, shape[dim], rows):
        part_offset = (*offset[:dim], offset[dim] + first, *offset[dim + 1 :])
        yield from _cut(part_offset, (*shape[:dim], min(rows, shape[dim] - first), *shape[dim + 1 :]), most)


def _views(
    buffer: Tensor, content: Tensor, entries: Mapping[str, TensorEntry], parts: Sequence[_Box]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part's place in the buffer of a round, and in the publication."""
    start = 0
    for name, offset, shape in parts:
        dtype = getattr(torch, entries[name].dtype)
        end = start + math.prod(shape) * dtype.itemsize
        box = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        yield buffer[start:end].view(dtype).view(shape), entries[name].view(content)[box]
        start = end
