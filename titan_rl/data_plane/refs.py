"""The controller's reference to a sample: where it is, and every number that a decision needs."""

from __future__ import annotations

from typing import NamedTuple

from titan_rl.data_plane.layout import encoded_size
from titan_rl.types import NO_VERSION, TrainingSample


class SampleRef(NamedTuple):
    """One sample in one store.

    It names that sample for ever: `(store, sample_id)` is never used again, neither after a release nor for another
    attempt at the same group. A tuple, because it pickles to fewer than 100 bytes, whatever the sample's length.
    """

    store: str
    sample_id: int
    """Counted from 0 by the store."""
    group_id: int
    sample: int
    """Number within the group, which names one branch of one rollout (see `TrainingSample`)."""
    length: int
    """Tokens, prompt included."""
    trained_tokens: int
    reward: float
    oldest_version: int
    """Smallest encoded PolicyVersion among the trained tokens; NO_VERSION where none is trained."""
    location: str
    """Path of the file that holds it, on the store's host."""
    offset: int
    """Bytes from the beginning of the file."""
    checksum: int
    """Of its bytes, as `layout.checksum_of` counts."""

    @property
    def nbytes(self) -> int:
        return encoded_size(self.length)


def oldest_version_of(sample: TrainingSample) -> int:
    """Smallest encoded version among the trained tokens; NO_VERSION where none is trained."""
    versions = sample.versions[sample.loss_mask]
    return int(versions.min()) if len(versions) else NO_VERSION
