"""What two trainer ranks do; both ranks call the same function. Results pickle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weight_examples import (
    ALIASES,
    HEAD,
    SCALE,
    SHAPES,
    Engine,
    copied,
    publisher_in,
    same_bytes,
    weights,
    whole_shards,
)

from titan_rl.types import PolicyVersion
from titan_rl.weights import publisher as publishing
from titan_rl.weights.fingerprint import combined_fingerprint
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.puller import SharedMemoryReader, verify

CUT_SHAPES = {name: shape for name, shape in SHAPES.items() if name != SCALE} | {"one_row": (1, 3), "odd": (5, 7)}
V1, V2, V3 = (PolicyVersion(0, step) for step in (1, 2, 3))
CHUNKS_BEFORE_DEATH = 2


def policy(step: int) -> dict[str, Tensor]:
    return weights(step, CUT_SHAPES)


def fsdp_shards(rank: int, tensors: dict[str, Tensor]) -> Iterator[TensorShard]:
    """Rows as FSDP over two ranks cuts them; some of the second rank's are empty."""
    for name, tensor in tensors.items():
        size = -(-len(tensor) // 2)
        first = min(rank * size, len(tensor))
        offset = (first,) + (0,) * (tensor.dim() - 1)
        data = tensor[first : first + size].clone()
        yield TensorShard(name=name, data=data, global_shape=tuple(tensor.shape), offset=offset)


def tensor_parallel_shards(rank: int, tensors: dict[str, Tensor]) -> Iterator[TensorShard]:
    """Matrices cut by rows or by columns, the rest replicated."""
    holder = Engine(rank, 2, shapes=CUT_SHAPES)
    holder.load(tensors.items())
    return (shard for shard in holder.served_shards() if shard.name != HEAD)


def parallelism_pairs(rank: int, directory: Path) -> dict[str, bool]:
    """By writers and readers, whether every reader saw every byte and verified what it loaded."""
    results: dict[str, bool] = {}
    writers = {"FSDP 2": fsdp_shards, "TP 2": tensor_parallel_shards}
    reader = SharedMemoryReader()
    for step, (writing, shards) in enumerate(writers.items(), start=1):
        channel = writing.replace(" ", "_")
        publisher = publisher_in(directory, channel=channel, rank=rank, group=dist.group.WORLD)
        publication = publisher.publish(
            PolicyVersion(0, step), shards(rank, policy(step)), dtype=torch.float32, aliases=ALIASES
        )
        results |= {f"{writing} → {each}": right for each, right in _read(reader, publication, rank, step).items()}
        publisher.close()
    alone = publisher_in(directory, channel="alone") if rank == 0 else None
    published: list[Publication | None] = [None]
    if alone is not None:
        published = [alone.publish(V3, whole_shards(policy(3)), dtype=torch.float32, aliases=ALIASES)]
    dist.broadcast_object_list(published, src=0)
    assert published[0] is not None
    results |= {f"1 → {each}": right for each, right in _read(reader, published[0], rank, 3).items()}
    if alone is not None:
        alone.close()
    return results


def _read(reader: SharedMemoryReader, publication: Publication, rank: int, step: int) -> dict[str, bool]:
    expected = combined_fingerprint(publication.manifest)
    exact = same_bytes(copied(reader.tensors(publication)), policy(step))
    results = {}
    for name, engine, group in (
        ("TP 2", Engine(rank, 2, shapes=CUT_SHAPES), dist.group.WORLD),
        ("TP 1", Engine(shapes=CUT_SHAPES), None),
    ):
        engine.load(reader.tensors(publication))
        results[name] = exact and verify(publication, engine.served_shards(), group) == expected
    dist.barrier()  # nobody closes what another one reads
    return results


def publish_first(rank: int, directory: Path) -> tuple[SharedMemoryPublisher, Publication]:
    """A publisher of both ranks, and v1, which is whole."""
    publisher = publisher_in(directory, rank=rank, group=dist.group.WORLD)
    return publisher, publisher.publish(V1, fsdp_shards(rank, policy(1)), dtype=torch.float32, aliases=ALIASES)


def die_publishing(publisher: SharedMemoryPublisher, rank: int) -> dict[str, str]:
    """Rank 1 kills itself when it has written a part of v2. On rank 0: what publishing came to."""
    if rank == 1:
        fingerprint, written = publishing.shard_fingerprint, 0

        def dying(*args: Any) -> int:
            nonlocal written
            written += 1
            if written > CHUNKS_BEFORE_DEATH:
                os.kill(os.getpid(), signal.SIGKILL)
            return fingerprint(*args)

        publishing.shard_fingerprint = dying
    try:
        second = publisher.publish(V2, fsdp_shards(rank, policy(2)), dtype=torch.float32, aliases=ALIASES)
    except Exception as error:  # gloo's own: the other rank is gone
        return {"error": f"{type(error).__name__}: {error}"}
    return {"published": second.location}
