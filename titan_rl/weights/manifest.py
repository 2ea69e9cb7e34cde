"""Publications, the shards that they are made of, and how a pull of one went: plain data between processes.

A publication is immutable: one version, one manifest, one place. The fingerprint of a tensor (see
`weights.fingerprint`) is taken in the dtype that is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_rl.types import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Hugging Face names of the two tensors that are one where embeddings are tied."""
TIED = ((LM_HEAD, EMBEDDING),)
"""The aliases of a publication whose embeddings are tied."""

PANELS, MATRIX = 4, 2
"""Dimensions of a packed matrix in memory, and of the matrix that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """A box of a global tensor, held by this rank.

    Over all ranks that publish, the shards with `counted=True` of one name cover every element exactly once.
    """

    name: str
    """Hugging Face name."""
    data: Tensor
    """The local box, a view of live weights. Of a packed matrix: panels [P, R, G, W], where the box has P·R rows and
    G·W columns."""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Global index of the box's first element, one entry per dimension."""
    counted: bool = True
    """False on a replica whose box another rank publishes."""

    @staticmethod
    def whole(name: str, data: Tensor) -> TensorShard:
        """A tensor that this rank holds as a whole."""
        return TensorShard(name=name, data=data, global_shape=tuple(data.shape), offset=(0,) * data.dim())

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        if self.data.dim() == PANELS and len(self.global_shape) == MATRIX:
            panels, rows, groups, width = self.data.shape
            return panels * rows, groups * width
        return tuple(self.data.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a publication, by its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """"float32" or "bfloat16"."""
    offset: int
    """Bytes from the start of the publication."""
    nbytes: int
    fingerprint: int
    """Signed 64-bit."""

    def view(self, content: Tensor) -> Tensor:
        """The tensor in the bytes of a publication."""
        import torch  # here: the controller imports this module and has no use for torch

        return content[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All tensors of a publication in order of offset."""

    entries: tuple[TensorEntry, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """`(name, entry name)`: tensors that share an entry's bytes, such as a tied `lm_head.weight`. An engine must be
    right about an alias too."""
    nbytes: int
    served: tuple[TensorEntry, ...] = ()
    """Where the entries are LoRA's adapters: the effective weights, of which no bytes are published."""

    @property
    def expected(self) -> dict[str, TensorEntry]:
        """What an engine must compute with, by name; aliases with the entry whose bytes they share."""
        entries = {entry.name: entry for entry in self.served or self.entries}
        return entries | {alias: entries[name] for alias, name in self.aliases}


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights that can be pulled."""

    channel: str
    """Names the policy among those that are published."""
    version: PolicyVersion
    manifest: Manifest
    location: str
    """Of its segment (`segment_files`); the same on every host."""
    hosts: tuple[str, ...] = ()
    """Where the trainer has written it; relays bring it to the others."""
    serial: int = 0
    """Of two publications at one location, the one with the larger number was made later."""

    def __str__(self) -> str:
        return f"{self.channel} {self.version}"


@dataclass(frozen=True, slots=True)
class FleetPull:
    """How one pull went, over the whole fleet."""

    version: PolicyVersion
    serving: tuple[str, ...]
    """Generators that serve the version."""
    failures: dict[str, str]
    """By generator that serves no version: why."""
