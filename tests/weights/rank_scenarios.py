"""What every rank of a world of two runs for test_weight_ranks.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weight_examples import (
    EMBEDDING,
    LM_HEAD,
    SCALE,
    SHAPES,
    TIED,
    Engine,
    copied,
    publisher_in,
    same_bytes,
    weights,
    whole_shards,
)

from titan_rl.errors import WeightsError
from titan_rl.processes import OWNER, join_world
from titan_rl.types import PolicyVersion
from titan_rl.weights import publisher as publishing
from titan_rl.weights.fingerprint import combined_fingerprint
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.puller import SharedMemoryReader, verify

CUT_SHAPES = {name: shape for name, shape in SHAPES.items() if name != SCALE} | {"one_row": (1, 3), "odd": (5, 7)}
NORM, BY_COLUMNS = "model.norm.weight", "odd"
"""Replicated in a tensor-parallel engine; cut by columns there."""
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
    return (shard for shard in holder.served_shards() if shard.name != LM_HEAD)


def parallelism_pairs(rank: int, directory: Path) -> dict[str, bool]:
    """By writers and readers, whether every reader saw every byte and verified what it loaded."""
    results: dict[str, bool] = {}
    writers = {"FSDP 2": fsdp_shards, "TP 2": tensor_parallel_shards}
    reader = SharedMemoryReader()
    for step, (writing, shards) in enumerate(writers.items(), start=1):
        channel = writing.replace(" ", "_")
        publisher = publisher_in(directory, channel=channel, rank=rank, group=dist.group.WORLD)
        publication = publisher.publish(
            PolicyVersion(0, step), shards(rank, policy(step)), dtype=torch.float32, aliases=TIED
        )
        results |= {f"{writing} → {each}": right for each, right in _read(reader, publication, rank, step).items()}
        publisher.close()
    alone = publisher_in(directory, channel="alone") if rank == 0 else None
    published: list[Publication | None] = [None]
    if alone is not None:
        published = [alone.publish(V3, whole_shards(policy(3)), dtype=torch.float32, aliases=TIED)]
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


def two_writers(rank: int, directory: Path) -> dict[str, Publication]:
    """Files are left for the parent process to read."""
    by_rows = publisher_in(directory, channel="rows", rank=rank, group=dist.group.WORLD)
    by_columns = publisher_in(directory, channel="columns", rank=rank, group=dist.group.WORLD)
    shards = fsdp_shards(rank, policy(1)), tensor_parallel_shards(rank, policy(1))
    return {
        "float32": by_rows.publish(V1, shards[0], dtype=torch.float32, aliases=TIED),
        "bfloat16": by_columns.publish(V1, shards[1], dtype=torch.bfloat16, aliases=TIED),
    }


def error_of(call: Any) -> str:
    try:
        call()
    except WeightsError as error:
        return str(error)
    return ""


def writers_that_fail(rank: int, directory: Path) -> dict[str, Any]:
    """Errors of every rank, and what can be read of the last good version after each."""
    publisher = publisher_in(directory, channel="failing", rank=rank, group=dist.group.WORLD)
    reader = SharedMemoryReader()
    first = publisher.publish(V1, fsdp_shards(rank, policy(1)), dtype=torch.float32)

    def raising() -> Iterator[TensorShard]:
        yield from fsdp_shards(rank, policy(2))
        if rank == 1:
            raise RuntimeError("out of luck")

    def unwritable() -> Iterator[TensorShard]:
        for shard in fsdp_shards(rank, policy(2)):
            yield replace(shard, data=shard.data.to("meta")) if rank == 1 and shard.name == BY_COLUMNS else shard

    def incomplete() -> Iterator[TensorShard]:
        return (shard for shard in fsdp_shards(rank, policy(2)) if rank == 0 or shard.name != BY_COLUMNS)

    def other_shape() -> Iterator[TensorShard]:
        yield TensorShard(name=NORM, data=torch.zeros(0), global_shape=(7 + rank,), offset=(0,))

    errors = {
        each.__name__: error_of(lambda: publisher.publish(V2, each(), dtype=torch.float32))  # noqa: B023 (called now)
        for each in (raising, unwritable, incomplete, other_shape)
    }
    other = PolicyVersion(0, 2 + rank)
    errors["other_version"] = error_of(
        lambda: publisher.publish(other, fsdp_shards(rank, policy(2)), dtype=torch.float32)
    )
    intact = same_bytes(copied(reader.tensors(first)), policy(1))
    second = publisher.publish(V2, fsdp_shards(rank, policy(2)), dtype=torch.float32)
    dist.barrier()
    after = same_bytes(copied(reader.tensors(second)), policy(2))
    dist.barrier()
    publisher.close()
    dist.barrier()
    return {
        "errors": errors,
        "intact": intact,
        "after": after,
        "left": [path.name for path in directory.iterdir() if "failing" in path.name],
    }


def verified_engines(rank: int, directory: Path) -> dict[str, Any]:
    """A tensor-parallel engine of two ranks: right, and wrong on one rank in several ways."""
    publisher = publisher_in(directory, channel="verified", rank=rank, group=dist.group.WORLD)
    tensors = policy(3)
    publication = publisher.publish(V3, fsdp_shards(rank, tensors), dtype=torch.float32, aliases=TIED)

    def check(damage: str = "", on: int = 1) -> Any:
        engine = Engine(rank, 2, shapes=CUT_SHAPES)
        engine.load(tensors.items())
        if damage and rank == on:
            engine.parameters[damage].view(-1).view(torch.int32)[-1] ^= 1 << 30
        return lambda: verify(publication, engine.served_shards(), dist.group.WORLD)

    def replicated_part(damaged: bool) -> Any:
        """Both ranks hold the whole embedding, in two boxes."""
        engine = Engine(rank, 2, shapes=CUT_SHAPES)
        engine.load(tensors.items())
        shards = [shard for shard in engine.served_shards() if shard.name != EMBEDDING]
        for first, rows in zip((0, 2), tensors[EMBEDDING].clone().split([2, len(tensors[EMBEDDING]) - 2]), strict=True):
            if damaged and rank == 1 and not first:
                rows[1, 1] += 1
            shards.append(TensorShard(name=EMBEDDING, data=rows, global_shape=CUT_SHAPES[EMBEDDING], offset=(first, 0)))
        return lambda: verify(publication, shards, dist.group.WORLD)

    result = {
        "fingerprint": check()(),
        "with replicated part": replicated_part(damaged=False)(),
        "errors": {
            "column shard": error_of(check(BY_COLUMNS)),
            "head": error_of(check(LM_HEAD)),
            "norm of rank 0": error_of(check(NORM, on=0)),
            "norm of rank 1": error_of(check(NORM, on=1)),
            "replicated part": error_of(replicated_part(damaged=True)),
        },
    }
    publisher.close()
    return result


def a_writer_that_dies(rank: int, directory: Path) -> dict[str, Any]:
    """Rank 1 kills itself when it has written a part of v2. On rank 0: v1, and what publishing v2 came to."""
    publisher = publisher_in(directory, channel="dying", rank=rank, group=dist.group.WORLD)
    first = publisher.publish(V1, fsdp_shards(rank, policy(1)), dtype=torch.float32, aliases=TIED)
    if rank == 1:
        fingerprint, written = publishing.shard_sum, 0

        def dying(*args: Any) -> Tensor:
            nonlocal written
            written += 1
            if written > CHUNKS_BEFORE_DEATH:
                os.kill(os.getpid(), signal.SIGKILL)
            return fingerprint(*args)

        publishing.shard_sum = dying
    error = ""
    try:
        publisher.publish(V2, fsdp_shards(rank, policy(2)), dtype=torch.float32, aliases=TIED)
    except Exception as lost:  # gloo's own: the other rank is gone
        error = f"{type(lost).__name__}: {lost}"
    return {"first": first, "error": error}


def in_world(scenario: Callable[[int, Path], Any], directory: Path, owner: int) -> Any:
    """One of the above, on this rank."""
    os.environ[OWNER] = str(owner)
    join_world("gloo")
    return scenario(dist.get_rank(), directory)
