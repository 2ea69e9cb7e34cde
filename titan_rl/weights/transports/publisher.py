"""What publishing is, whatever the transport: every trainer rank writes its own shards, nothing is gathered.

    publish: free slot -> all ranks store and fingerprint -> sums agree -> sealed -> Publication      release: slot free

What always holds:

- A publication exists once every rank has written everything: `publish` returns it behind the last collective. A
  rank that dies or raises half-way leaves a free slot with rubbish in it and every live publication as it was.
- The bytes of a live publication do not change. A slot is written only while it is free.
- All ranks agree: names, shapes, slot and version are compared before the first byte is written.
- A channel knows nothing of other channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.fingerprint import BITS
from titan_rl.weights.manifest import Manifest, Publication
from titan_rl.weights.ranks import Ranks
from titan_rl.weights.shards import TensorShard
from titan_rl.weights.transports.layout import Aliases, Area, Layout, Shapes, merged_layout, shapes_of, write_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALIGNMENT = 64
"""Bytes; what tensors in memory start at a multiple of (a cache line, and what vector loads like)."""


class ChannelPublisher(ABC):
    """One trainer rank's end of a channel. All ranks call `publish`, `release` and `close` in the same order.

    Args:
        channel: names the policy among those that are published; a plain word.
        rank: of this process in `group`.
        group: the trainer's ranks; its backend must take CPU tensors. None: one rank.
        max_live: publications that may exist at once; room for that many is kept.
        transfer_dtype: what the bytes are stored in where it is narrower than what is served; None: as served.
        delta: readers may leave out what did not change.
    """

    alignment: ClassVar[int | None] = ALIGNMENT
    """See `layout.merged_layout`."""

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
        self._channel = channel
        self._rank = rank
        self._ranks = Ranks(group)
        self._max_live = max_live
        self._transfer_dtype = transfer_dtype
        self._delta = delta
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
            return slot, mine, shapes_of(mine)

        slot, mine, shapes = self._ranks.together(what, prepare, equal=lambda result: (version, result[0]))
        layout = self._agreed_layout(what, shapes, dtype, tuple(aliases))
        area = self._open(what, version, slot, layout, mine)
        sums = self._ranks.together(what, lambda: write_shards(mine, layout, area))
        self._ranks.add(sums)
        fingerprints, elements = sums.tolist()
        manifest = layout.manifest(what, fingerprints, elements)
        location = self._seal(what, version, slot, manifest)
        self._live[version] = slot
        return Publication(
            channel=self._channel, version=version, manifest=manifest, location=location, delta=self._delta
        )

    def release(self, version: PolicyVersion) -> None:
        """Nobody reads this version any more: its room may be used again. Raises WeightsError if not live."""
        if version not in self._live:
            raise WeightsError(f"{self._channel} {version} cannot be released: live are {self._live_names()}")
        del self._live[version]
        self._released(version)

    def close(self) -> None:
        """Give back what the transport holds; nothing can be published any more."""
        self._closed = True
        self._live.clear()
        self._give_back()

    @abstractmethod
    def _open(
        self, what: str, version: PolicyVersion, slot: int, layout: Layout, shards: Sequence[TensorShard]
    ) -> Area:
        """Room for this rank's shards in a free slot, invisible to readers of anything that is live. Collective."""

    @abstractmethod
    def _seal(self, what: str, version: PolicyVersion, slot: int, manifest: Manifest) -> str:
        """All ranks wrote everything: the publication's location, the same on all ranks. Collective."""

    @abstractmethod
    def _released(self, version: PolicyVersion) -> None:
        """This version was live until now."""

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
            narrower = self._transfer_dtype is not None and self._transfer_dtype.itemsize < dtype.itemsize
            stored = self._transfer_dtype if self._transfer_dtype is not None and narrower else dtype
            self._layout = self._ranks.together(
                what, lambda: merged_layout(told, stored=stored, alignment=self.alignment)
            )
            self._layout_of = described
        assert self._layout is not None
        return self._layout
