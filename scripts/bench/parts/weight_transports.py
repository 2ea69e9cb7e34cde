"""The trainer's side of `weight_sync.py`, for each transport: publishes, and copies without doing anything else.

Shared memory and files are published by the measuring process itself; RDMA by a Monarch process of its own, because
fetching from one's own memory would be no transfer.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from monarch.actor import Actor, endpoint, this_host
from torch import Tensor

from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.qwen3 import EMBEDDING, LM_HEAD
from titan_rl.policy.models.tiny import tiny_shape
from titan_rl.types import PolicyVersion
from titan_rl.weights.config import WeightsConfig
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import make_publisher
from titan_rl.weights.shared_memory import SharedMemoryReader

CHANNEL = "bench"
TRANSPORTS = ("shared_memory", "filesystem", "rdma")

Timed = tuple[Publication, float]
"""A publication, and the seconds that publishing it took."""


class Trainer(Protocol):
    """One trainer rank with two sets of weights, which take turns."""

    def publish(self, step: int) -> Timed:
        """Store and fingerprint."""

    def copy_in(self, publication: Publication) -> float:
        """Seconds for the bytes alone, from the trainer's tensors to where readers find them."""

    def release(self, version: PolicyVersion) -> None: ...

    def close(self) -> None: ...


def trained_weights(config: TinyPolicyConfig) -> list[dict[str, Tensor]]:
    """Float32, the same in every process."""
    random = torch.Generator().manual_seed(1)
    shapes = tiny_shape(config).tensor_shapes()
    return [{name: torch.randn(shape, generator=random) * 0.02 for name, shape in shapes.items()} for _ in range(2)]


def make_trainer(transport: str, config: TinyPolicyConfig, directory: Path) -> Trainer:
    if transport == "rdma":
        return RemoteTrainer(config)
    return LocalTrainer(transport, trained_weights(config), directory)


class LocalTrainer:
    """Publishes from this process."""

    def __init__(self, transport: str, trained: list[dict[str, Tensor]], directory: Path) -> None:
        self._trained = trained
        self._transport = transport
        self._scratch = directory / "copy"
        self._warm: dict[str, Tensor] = {}
        weights = WeightsConfig(transport=transport, directory=str(directory))  # type: ignore[arg-type]
        self._publisher = make_publisher(weights, channel=CHANNEL, owner_pid=os.getpid(), rank=0, group=None)

    def publish(self, step: int) -> Timed:
        shards = [
            TensorShard(name=name, data=tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim())
            for name, tensor in self._trained[step % 2].items()
        ]
        started = time.perf_counter()
        publication = self._publisher.publish(
            PolicyVersion(0, step), shards, dtype=torch.float32, aliases=((LM_HEAD, EMBEDDING),)
        )
        return publication, time.perf_counter() - started

    def copy_in(self, publication: Publication) -> float:
        """Into the segment itself; into a file beside; into registered memory's like."""
        tensors = self._trained[publication.version.step % 2]
        match self._transport:
            case "shared_memory":
                targets = dict(SharedMemoryReader().tensors(publication))
            case "filesystem":
                return self._written(tensors)
            case _:
                self._warm = targets = self._warm or {name: torch.zeros_like(each) for name, each in tensors.items()}
        started = time.perf_counter()
        for name, target in targets.items():
            target.copy_(tensors[name])
        return time.perf_counter() - started

    def release(self, version: PolicyVersion) -> None:
        self._publisher.release(version)

    def close(self) -> None:
        self._publisher.close()

    def _written(self, tensors: dict[str, Tensor]) -> float:
        started = time.perf_counter()
        with open(self._scratch, "wb", buffering=0) as file:
            for tensor in tensors.values():
                file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        seconds = time.perf_counter() - started
        self._scratch.unlink()
        return seconds


class RdmaTrainer(Actor):
    """A `LocalTrainer` in a process of its own."""

    def __init__(self, config: TinyPolicyConfig) -> None:
        self._trainer = LocalTrainer("rdma", trained_weights(config), Path())

    @endpoint
    def publish(self, step: int) -> Timed:
        return self._trainer.publish(step)

    @endpoint
    def copy_in(self, publication: Publication) -> float:
        return self._trainer.copy_in(publication)

    @endpoint
    def release(self, version: PolicyVersion) -> None:
        self._trainer.release(version)

    @endpoint
    def close(self) -> None:
        self._trainer.close()


class RemoteTrainer:
    """The handle of an `RdmaTrainer`."""

    def __init__(self, config: TinyPolicyConfig) -> None:
        self._mesh = this_host().spawn_procs(per_host={"ranks": 1}, name="trainer")
        self._actor: Any = self._mesh.spawn("trainer", RdmaTrainer, config)

    def publish(self, step: int) -> Timed:
        return self._actor.publish.call_one(step).get()

    def copy_in(self, publication: Publication) -> float:
        return self._actor.copy_in.call_one(publication).get()

    def release(self, version: PolicyVersion) -> None:
        self._actor.release.call_one(version).get()

    def close(self) -> None:
        self._actor.close.call_one().get()
        self._mesh.stop().get()
