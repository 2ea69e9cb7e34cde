"""Training samples to store, and how to compare them bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleStore
from titan_rl.support import Supports
from titan_rl.types import NO_VERSION, PolicyVersion, TrainingSample

ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions", "advantages")


def sample_of(
    length: int, *, group_id: int = 0, sample: int = 0, seed: int = 0, truncated: bool = False
) -> TrainingSample:
    """`length` tokens, the second half of them sampled under two versions, `truncated` from less than all ids."""
    rng = np.random.default_rng([seed, length, group_id + 2**31, sample])
    mask = np.arange(length) >= max(1, length // 2)
    versions = np.where(np.arange(length) % 2, PolicyVersion(1, 6).encode(), PolicyVersion(1, 5).encode())
    return TrainingSample(
        group_id=group_id,
        sample=sample,
        token_ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length, dtype=np.float32), np.float32(0)),
        versions=np.where(mask, versions, NO_VERSION),
        advantages=float(rng.normal()),
        reward=float(rng.random()),
        supports=supports_of(mask, rng) if truncated else None,
        routes=rng.integers(-1, 128, (length, 3, 2), np.int16) if truncated and sample % 2 else None,
        unrouted=sample,
    )


def supports_of(mask: np.ndarray, rng: np.random.Generator) -> Supports | None:
    """Of each token of the mask."""
    values = {int(place): rng.integers(0, 2**31 - 1, rng.integers(2, 9), np.int32) for place in np.flatnonzero(mask)}
    return Supports.of(values, 0, len(mask))


def group_of(count: int, length: int, **known: Any) -> list[TrainingSample]:
    return [sample_of(length, sample=number, **known) for number in range(count)]


def put(store: SampleStore, samples: list[TrainingSample]) -> SampleBatch:
    return SampleBatch.of(store.put(samples))


def all_bits(samples: Iterable[TrainingSample]) -> list[tuple[object, ...]]:
    return [bits(sample) for sample in samples]


def bits(sample: TrainingSample) -> tuple[object, ...]:
    """Everything of a sample, comparable; NaN equals itself."""
    arrays = [(array.dtype.str, array.tobytes()) for array in (getattr(sample, name) for name in ARRAYS)]
    numbers = np.array([sample.advantage, sample.reward, sample.unrouted]).tobytes()
    routes = None if sample.routes is None else (sample.routes.dtype.str, sample.routes.shape, sample.routes.tobytes())
    supports = sample.supports and (sample.supports.sizes.tobytes(), sample.supports.values.tobytes())
    return (sample.group_id, sample.sample, numbers, supports, routes, *arrays)
