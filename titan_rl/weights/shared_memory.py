"""Publishes weights in shared memory: all ranks of a host write their shards into one mapping, generators read views.

A trainer over several hosts ends a publication with the same bytes in a segment of each (`exchange`).

Segments are recycled. A fresh one costs the time of eight copies, because the kernel has to find and clear it. The
rest of what holds is in `publisher`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan_rl.errors import StorageError, WeightsError
from titan_rl.processes import HOST
from titan_rl.types import PolicyVersion
from titan_rl.weights.exchange import HostExchange
from titan_rl.weights.manifest import Publication, TensorEntry, TensorShard
from titan_rl.weights.publisher import ALIGNMENT, ChannelPublisher, Layout, Put, box_view, entry_view
from titan_rl.weights.segment_files import (
    DIRECTORY,
    Identity,
    create_segment,
    identity_of,
    map_segment,
    segment_at,
    segment_location,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SharedMemoryPublisher(ChannelPublisher):
    """See `ChannelPublisher`.

    Args:
        hosts: of every rank, by rank, where there are several; the first rank of a host makes and removes its files.
        directory: of the files, on every host.
    """

    def __init__(
        self,
        *,
        channel: str,
        rank: int,
        group: ProcessGroup | None,
        max_live: int,
        hosts: Sequence[str] = (),
        directory: Path = DIRECTORY,
    ) -> None:
        super().__init__(channel=channel, rank=rank, group=group, max_live=max_live)
        self._hosts = tuple(dict.fromkeys(hosts)) or (os.environ.get(HOST, "host0"),)
        self._is_first = rank == (hosts.index(hosts[rank]) if hosts else 0)
        self._exchange = HostExchange(rank, self._ranks, hosts) if len(self._hosts) > 1 else None
        self._opened: tuple[Layout, Sequence[TensorShard]] | None = None
        self._locations = [segment_location(directory, channel, slot) for slot in range(max_live)]
        self._mapped: dict[int, Tensor] = {}  # slot -> its bytes

    def _open(
        self, what: str, version: PolicyVersion, slot: int, layout: Layout, shards: Sequence[TensorShard]
    ) -> None:
        """Map the slot; made or replaced first where it is missing or too small (on all ranks alike)."""
        self._opened = layout, shards
        mapped, path = self._mapped.get(slot), segment_at(self._locations[slot])
        nbytes = max(layout.nbytes, ALIGNMENT)  # an empty file cannot be mapped
        if mapped is None or mapped.numel() < nbytes:
            self._mapped.pop(slot, None)
            self._ranks.together(what, lambda: _create(path, nbytes) if self._is_first else None)
            self._mapped[slot] = self._ranks.together(what, lambda: _map(path).content)

    def _place(self, slot: int, shard: TensorShard, entry: TensorEntry) -> Put:
        whole = entry_view(self._mapped[slot], entry)
        target = box_view(whole, shard.offset, shard.data.shape) if entry.shape else whole.reshape(1)
        return lambda row, rows: target[row : row + len(rows)].copy_(rows)

    def _seal(self, what: str, version: PolicyVersion, slot: int) -> str:
        if self._exchange is not None:
            assert self._opened is not None
            layout, written = self._opened
            self._exchange.complete(what, self._mapped[slot], layout.entries, written)
        self._opened = None
        return self._locations[slot]

    def _slot_of(self, publication: Publication, slot: int) -> int:
        return self._locations.index(publication.location)

    def _give_back(self) -> None:
        """Mappings of readers stay valid."""
        self._mapped.clear()
        if self._is_first:
            for location in self._locations:
                segment_at(location).unlink(missing_ok=True)


class SharedMemoryReader:
    """A generator rank's end: zero-copy views of what was published on this host."""

    def __init__(self) -> None:
        self._mapped: dict[Path, _Mapping] = {}

    def tensors(self, publication: Publication) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReader`. Views of the publication itself; a recycled segment keeps its mapping.

        Raises:
            WeightsError: at once, if the publication is gone or shorter than its manifest says.
        """
        content = self._content(publication)
        return ((entry.name, entry_view(content, entry)) for entry in publication.manifest.entries)

    def _content(self, publication: Publication) -> Tensor:
        path = segment_at(publication.location)
        mapping = self._mapped.get(path)
        try:
            if mapping is None or mapping.identity != identity_of(path):
                # A name with another file behind it: the publisher was started again, or needed more room.
                self._mapped = {name: kept for name, kept in self._mapped.items() if name.exists()}
                mapping = self._mapped[path] = _map(path)
        except FileNotFoundError as error:
            raise WeightsError(f"{publication.channel} {publication.version} is gone: there is no {path}") from error
        if mapping.content.numel() < publication.manifest.nbytes:
            raise WeightsError(
                f"{publication.channel} {publication.version}: {path} holds {mapping.content.numel()} bytes, "
                f"its manifest says {publication.manifest.nbytes}"
            )
        return mapping.content


@dataclass(frozen=True, slots=True)
class _Mapping:
    content: Tensor  # [bytes] uint8
    identity: Identity


def _create(path: Path, nbytes: int) -> None:
    try:
        create_segment(path, nbytes)
    except StorageError as error:
        raise WeightsError(f"{error} or lower weights.max_live") from error


def _map(path: Path) -> _Mapping:
    mapped, identity = map_segment(path)
    # The tensor keeps the mapping alive; it goes with the last view.
    return _Mapping(torch.frombuffer(mapped, dtype=torch.uint8), identity)
