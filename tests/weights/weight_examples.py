"""What the tests of weights share: weights, shards, a publisher, an engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_rl.types import PolicyVersion
from titan_rl.weights.fingerprint import shard_sum
from titan_rl.weights.manifest import EMBEDDING, LM_HEAD, TIED, Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher

SCALE, EMPTY = "scale", "empty"
SHAPES = {
    "model.norm.weight": (7,),
    EMBEDDING: (13, 64),
    "big": (1500, 900),
    "cube": (5, 4, 3),
    SCALE: (),
    EMPTY: (0, 3),
}


def weights(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shard_fingerprint(data: Tensor, global_shape: tuple[int, ...], offset: tuple[int, ...]) -> int:
    return int(shard_sum(data, global_shape, offset))


def whole_shards(tensors: dict[str, Tensor]) -> list[TensorShard]:
    return [TensorShard.whole(name, data) for name, data in tensors.items()]


def publisher_in(
    directory: Path, *, channel: str = "policy", rank: int = 0, group: ProcessGroup | None = None, max_live: int = 2
) -> SharedMemoryPublisher:
    return SharedMemoryPublisher(channel=channel, rank=rank, group=group, max_live=max_live, directory=directory)


def publish(publisher: SharedMemoryPublisher, step: int, tensors: dict[str, Tensor]) -> Publication:
    return publisher.publish(
        PolicyVersion(0, step), whole_shards(tensors), dtype=torch.float32, aliases=TIED if EMBEDDING in tensors else ()
    )


def copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors}


def same_bytes(read: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return read.keys() == expected.keys() and all(
        read[name].dtype == tensor.dtype
        and read[name].shape == tensor.shape
        and torch.equal(bits(read[name]), bits(tensor))
        for name, tensor in expected.items()
    )


def bits(tensor: Tensor) -> Tensor:
    """NaN payloads and -0.0 count."""
    return tensor.contiguous().view(-1).view(torch.uint8)


class Engine:
    """One tensor-parallel rank with parameters of its own, logits projection apart: matrices cut by rows or columns."""

    def __init__(self, rank: int = 0, ranks: int = 1, *, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        self._rank, self._ranks = rank, ranks
        self._boxes: dict[str, tuple[tuple[slice, ...], tuple[int, ...], bool]] = {}
        self.parameters: dict[str, Tensor] = {}
        heads = {LM_HEAD: shapes[EMBEDDING]} if EMBEDDING in shapes else {}
        cut_dims = itertools.cycle((0, 1))
        for name, shape in (shapes | heads).items():
            index, counted = [slice(0, size) for size in shape], rank == 0
            if ranks > 1 and len(shape) == 2 and min(shape) >= ranks:
                dim = 0 if name in (EMBEDDING, LM_HEAD) else next(cut_dims)
                size = -(-shape[dim] // ranks)
                index[dim], counted = slice(rank * size, min((rank + 1) * size, shape[dim])), True
            self._boxes[name] = (tuple(index), shape, counted)
            self.parameters[name] = torch.zeros([each.stop - each.start for each in index])
        self.loaded: list[str] = []

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded = []
        for name, tensor in tensors:
            self.loaded.append(name)
            for target in (name, LM_HEAD) if name == EMBEDDING else (name,):
                self.parameters[target].copy_(tensor[self._boxes[target][0]])

    def served_shards(self) -> Iterator[TensorShard]:
        for name, data in self.parameters.items():
            index, shape, counted = self._boxes[name]
            offset = tuple(each.start for each in index)
            yield TensorShard(name=name, data=data, global_shape=shape, offset=offset, counted=counted)
