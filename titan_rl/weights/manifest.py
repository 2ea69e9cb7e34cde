"""What a publication contains, and the shards it is made of. A publication is immutable: one version, one manifest,
one place.

`fingerprint` of a tensor (see `weights.fingerprint`) is additive over its elements, and taken in the dtype that is
served; shards of any layout therefore sum to the fingerprint of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_rl.types import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """A box of a global tensor, held by this rank.

    Over all ranks the shards with `counted=True` of one name cover every element exactly once.
    """

    name: str
    """Hugging Face name."""
    data: Tensor  # the local box; a view of live weights, not a copy
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Global index of the box's first element, one entry per dimension."""
    counted: bool = True
    """False on a replica whose box another rank already counts (it is written once and checked locally)."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.data.shape, strict=True))


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
    """Unsigned 64-bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All tensors of a publication in order of offset."""

    entries: tuple[TensorEntry, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """`(name, entry name)`: tensors that share an entry's bytes, such as a tied `lm_head.weight`. An engine must be
    right about an alias too."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights that can be pulled."""

    channel: str
    """Names the policy among those that are published."""
    version: PolicyVersion
    manifest: Manifest
    location: str
    """For the transport to read: a path in shared memory, or another scheme's (`file:`, `rdma:`)."""
