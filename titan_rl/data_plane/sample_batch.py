"""References to samples, and the samples of one training step as the controller hands them on.

A reference says where a sample is and holds every number that a decision needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples, or references to samples, in a fixed order; make one with `of`.

    Every operation returns a new batch and copies no tokens. Every number is the same for samples and for references to
    them. A batch of references never reads a token by itself: a `SampleSource` fetches its samples.
    """

    items: tuple[TrainingSample, ...] | tuple[SampleRef, ...]

    @staticmethod
    def of(items: Iterable[TrainingSample] | Iterable[SampleRef]) -> SampleBatch:
        """All of one kind. Raises ValueError if they are not."""
        batch = SampleBatch(tuple(items))  # type: ignore[arg-type]
        if len({type(item) for item in batch.items}) > 1:
            raise ValueError("samples and references to samples cannot be one batch: fetch the references first")
        return batch

    @staticmethod
    def concat(batches: Iterable[SampleBatch]) -> SampleBatch:
        """One batch after the other."""
        return SampleBatch.of(item for batch in batches for item in batch.items)  # type: ignore[arg-type]

    def select(self, indices: Iterable[int]) -> SampleBatch:
        """The samples at these positions, in this order; a position may come twice."""
        return SampleBatch(tuple(self.items[index] for index in indices))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def is_local(self) -> bool:
        """Whether the batch holds samples and not references; True for an empty batch."""
        return not any(isinstance(item, SampleRef) for item in self.items[:1])

    @property
    def samples(self) -> tuple[TrainingSample, ...]:
        """Raises ValueError for a batch of references."""
        if not self.is_local:
            raise ValueError(f"these are references to {len(self)} samples: fetch them from a SampleSource")
        return self.items  # type: ignore[return-value]

    @property
    def refs(self) -> tuple[SampleRef, ...]:
        """Raises ValueError for a batch of samples."""
        if self.items and self.is_local:
            raise ValueError(f"these {len(self)} samples are in no store: there are no references")
        return self.items  # type: ignore[return-value]

    @property
    def stored_ids(self) -> dict[str, tuple[int, ...]]:
        """Ids by store, each id once, in the batch's order: what to release. Empty for samples."""
        ids: dict[str, dict[int, None]] = {}
        for ref in () if self.is_local else self.refs:
            ids.setdefault(ref.store, {})[ref.sample_id] = None
        return {store: tuple(distinct) for store, distinct in ids.items()}

    @property
    def group_ids(self) -> list[int]:
        return [item.group_id for item in self.items]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, prompt included."""
        return [item.length if isinstance(item, SampleRef) else len(item.token_ids) for item in self.items]

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss, over all samples."""
        return sum(
            item.trained_tokens if isinstance(item, SampleRef) else int(np.count_nonzero(item.loss_mask))
            for item in self.items
        )

    @property
    def rewards(self) -> list[float]:
        return [item.reward for item in self.items]

    @property
    def oldest_versions(self) -> list[int]:
        """Of each sample, the smallest encoded version among its trained tokens; NO_VERSION where none is trained."""
        return [
            item.oldest_version if isinstance(item, SampleRef) else oldest_version(trained_versions(item))
            for item in self.items
        ]


def trained_versions(sample: TrainingSample) -> np.ndarray:
    """[trained tokens] int64, their encoded versions."""
    return sample.versions[sample.loss_mask]


def oldest_version(versions: np.ndarray) -> int:
    """Smallest encoded version; NO_VERSION where there is none."""
    return int(np.minimum.reduce(versions)) if len(versions) else NO_VERSION
