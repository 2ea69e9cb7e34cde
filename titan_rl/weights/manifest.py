"""What a publication contains. A publication is immutable: one version, one manifest, one place.

`fingerprint` of a tensor (see `weights.fingerprint`) is additive over its elements, and taken in the dtype that is
served; shards of any layout therefore sum to the fingerprint of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a publication, by its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """"float32" or "bfloat16": what is served."""
    offset: int
    """Bytes from the start of the publication."""
    nbytes: int
    """Of the published bytes."""
    fingerprint: int
    """Unsigned 64-bit."""
    stored: str = ""
    """Dtype of the published bytes where they are narrower than what is served: "bfloat16"; else empty."""

    @property
    def stored_dtype(self) -> str:
        """Dtype of the published bytes."""
        return self.stored or self.dtype


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
    version: PolicyVersion
    manifest: Manifest
    location: str
    """For the transport to read: a path in shared memory, or another scheme's (`file:`, `rdma:`)."""
    delta: bool = False
    """Readers may leave out tensors whose fingerprint is that of the version they serve."""
