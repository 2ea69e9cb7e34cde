"""The trainer's side of `weight_sync.py`: publishes, and copies without doing anything else."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import tiny_shape
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import TIED, Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.puller import SharedMemoryReader

CHANNEL = "bench"

Timed = tuple[Publication, float]
"""A publication, and the seconds that publishing it took."""


def trained_weights(config: TinyPolicyConfig) -> list[dict[str, Tensor]]:
    """Float32, the same in every process."""
    random = torch.Generator().manual_seed(1)
    shapes = tiny_shape(config).tensor_shapes()
    return [{name: torch.randn(shape, generator=random) * 0.02 for name, shape in shapes.items()} for _ in range(2)]


class Trainer:
    """One trainer rank with two sets of weights, which take turns."""

    def __init__(self, config: TinyPolicyConfig) -> None:
        self._trained = trained_weights(config)
        self._publisher = SharedMemoryPublisher(channel=CHANNEL, rank=0, group=None, max_live=2)

    def publish(self, step: int) -> Timed:
        """Store and fingerprint."""
        shards = [TensorShard.whole(name, tensor) for name, tensor in self._trained[step % 2].items()]
        started = time.perf_counter()
        publication = self._publisher.publish(PolicyVersion(0, step), shards, dtype=torch.float32, aliases=TIED)
        return publication, time.perf_counter() - started

    def copy_in(self, publication: Publication) -> float:
        """Seconds for the bytes alone, from the trainer's tensors to where readers find them."""
        tensors = self._trained[publication.version.step % 2]
        targets = dict(SharedMemoryReader().tensors(publication))
        started = time.perf_counter()
        for name, target in targets.items():
            target.copy_(tensors[name])
        return time.perf_counter() - started

    def release(self, version: PolicyVersion) -> None:
        self._publisher.release(version)

    def close(self) -> None:
        self._publisher.close()
