"""References to samples, and the samples of one training step as the controller hands them on.

A reference says where a sample is and holds every number that a decision needs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, NamedTuple

import msgspec
import numpy as np

from titan_rl.types import NO_VERSION, TrainingSample

_TOKEN_BYTES = 21  # token id, logprob, version, advantage and a byte of the mask
_ALIGNMENT = 8  # of the size of an encoded sample, and so of the beginning of the next one


def encoded_size(length: int, support_bytes: int = 0, route_shape: tuple[int, int] = (0, 0)) -> int:
    """Bytes of a sample of `length` tokens, as a store writes it."""
    token_bytes = _TOKEN_BYTES + 2 * math.prod(route_shape)
    return -(-(length * token_bytes + support_bytes) // _ALIGNMENT) * _ALIGNMENT


class SampleRef(NamedTuple):
    """One sample in one store.

    It names that sample for ever: `(store, sample_id)` is never used again, neither after a release nor for another
    attempt at the same group.
    """

    store: str
    """Empty: the sample is in no store, but in its batch."""
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
    """Of its bytes."""
    advantage: float
    """Mean over the trained tokens."""
    support_bytes: int = 0
    """Of its supports; 0: every token was drawn from the whole vocabulary."""
    route_shape: tuple[int, int] = (0, 0)
    """Of its routes; zeros: it has none."""
    unrouted: int = 0
    """See `TrainingSample`."""

    @property
    def nbytes(self) -> int:
        return encoded_size(self.length, self.support_bytes, self.route_shape)


def reference_to(sample: TrainingSample) -> SampleRef:
    """The reference to a sample that is in no store."""
    versions = sample.versions[sample.loss_mask]
    return SampleRef(
        store="",
        sample_id=0,
        group_id=sample.group_id,
        sample=sample.sample,
        length=len(sample.token_ids),
        trained_tokens=len(versions),
        reward=sample.reward,
        oldest_version=int(np.minimum.reduce(versions)) if len(versions) else NO_VERSION,
        location="",
        offset=0,
        checksum=0,
        advantage=sample.advantage,
        support_bytes=sample.support_bytes,
        route_shape=sample.route_shape,
        unrouted=sample.unrouted,
    )


_encode = msgspec.msgpack.Encoder(enc_hook=methodcaller("item")).encode  # a script's numbers may be numpy's


def to_message(plain: Any, known: bytes = b"") -> bytes:
    """Plain data for a message. Names and numbers that rows have in common are most of it, so it is deflated: a report
    of 8 rollouts has 0.8 kB then, and 3.6 kB before. `known`: an example of it, which the receiver has too."""
    deflate = zlib.compressobj(zdict=known)
    return deflate.compress(_encode(plain)) + deflate.flush()


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """References to samples in a fixed order; make one with `of`.

    Every operation returns a new batch and copies no tokens. A `SampleSource` fetches the samples. A batch that a
    script made of samples takes them along; no store holds those.
    """

    refs: tuple[SampleRef, ...]
    samples: tuple[TrainingSample, ...] | None = None
    """Of a batch that was made of samples, one per reference. None: they are in stores."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_message, (to_message(self.refs), self.samples)

    @staticmethod
    def of(items: Iterable[TrainingSample] | Iterable[SampleRef]) -> SampleBatch:
        samples = tuple(items)
        if samples and isinstance(samples[0], TrainingSample):
            return SampleBatch(tuple(map(reference_to, samples)), samples)  # type: ignore[arg-type]
        return SampleBatch(samples)  # type: ignore[arg-type]

    @staticmethod
    def concat(batches: Iterable[SampleBatch]) -> SampleBatch:
        """One batch after the other. Raises ValueError if some take their samples along and others do not."""
        parts = [batch for batch in batches if len(batch)]
        refs = tuple(ref for batch in parts for ref in batch.refs)
        if not (along := [batch.samples for batch in parts if batch.samples is not None]):
            return SampleBatch(refs)
        if len(along) < len(parts):
            raise ValueError(
                "samples and references to stored samples cannot be one batch: fetch the stored ones first"
            )
        return SampleBatch(refs, tuple(sample for samples in along for sample in samples))

    def select(self, indices: Iterable[int]) -> SampleBatch:
        """The samples at these positions, in this order; a position may come twice."""
        chosen = tuple(indices)
        samples = None if self.samples is None else tuple(self.samples[index] for index in chosen)
        return SampleBatch(tuple(self.refs[index] for index in chosen), samples)

    def __len__(self) -> int:
        return len(self.refs)

    @property
    def stored_ids(self) -> dict[str, tuple[int, ...]]:
        """Ids by store, each id once, in the batch's order: what to release."""
        ids: dict[str, dict[int, None]] = {}
        for ref in self.refs if self.samples is None else ():
            ids.setdefault(ref.store, {})[ref.sample_id] = None
        return {store: tuple(distinct) for store, distinct in ids.items()}

    @property
    def group_ids(self) -> list[int]:
        return [ref.group_id for ref in self.refs]

    @property
    def lengths(self) -> list[int]:
        return [ref.length for ref in self.refs]

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss, over all samples."""
        return sum(ref.trained_tokens for ref in self.refs)

    @property
    def advantages(self) -> tuple[float, float]:
        """Their mean and deviation over trained tokens, each with its sample's mean advantage."""
        if not self.trained_tokens:
            return 0.0, 1.0
        counts, values = np.array([(ref.trained_tokens, ref.advantage) for ref in self.refs]).T
        mean = float(np.average(values, weights=counts))
        return mean, math.sqrt(float(np.average((values - mean) ** 2, weights=counts)))

    @property
    def oldest_versions(self) -> list[int]:
        return [ref.oldest_version for ref in self.refs]


_read_refs = msgspec.msgpack.Decoder(tuple[SampleRef, ...]).decode


def _from_message(refs: bytes, samples: tuple[TrainingSample, ...] | None) -> SampleBatch:
    return SampleBatch(_read_refs(zlib.decompress(refs)), samples)
