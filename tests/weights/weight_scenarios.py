"""What every rank of a world of two runs for test_weight_ranks.py; each scenario returns something that pickles."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_scenarios import parallelism_pairs
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.processes import join_world
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.puller import SharedMemoryReader, verify

EMBEDDING, HEAD, ROW_CUT, ONE_ROW, NORM = "embed.weight", "lm_head.weight", "o_proj.weight", "one_row", "norm.weight"
SHAPES = {EMBEDDING: (5, 6), ROW_CUT: (4, 7), ONE_ROW: (1, 3), NORM: (3,)}


def policy(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def fsdp_shards(rank: int, tensors: dict[str, Tensor]) -> Iterator[TensorShard]:
    """Rows as torch.chunk cuts them; the second rank has no row of `one_row`, and does not name it."""
    for name, tensor in tensors.items():
        chunks = tensor.chunk(2)
        if rank < len(chunks):
            first = rank * len(chunks[0])
            offset = (first,) + (0,) * (tensor.dim() - 1)
            yield TensorShard(name=name, data=chunks[rank], global_shape=tuple(tensor.shape), offset=offset)


def column_shards(rank: int, tensors: dict[str, Tensor]) -> Iterator[TensorShard]:
    """A tensor-parallel engine or trainer: embedding by rows, `o_proj` by columns, the rest replicated."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name == ROW_CUT:
            first = (0, 4)[rank]
            yield TensorShard(name=name, data=tensor[:, first : (4, 7)[rank]], global_shape=shape, offset=(0, first))
        elif name in (EMBEDDING, HEAD):
            first = (0, 3)[rank]
            yield TensorShard(name=name, data=tensor[first : (3, 5)[rank]], global_shape=shape, offset=(first, 0))
        else:
            offset = (0,) * tensor.dim()
            yield TensorShard(name=name, data=tensor, global_shape=shape, offset=offset, counted=rank == 0)


def error_of(call: Any) -> str:
    try:
        call()
    except WeightsError as error:
        return str(error)
    return ""


def publisher_in(directory: Path, rank: int, channel: str) -> SharedMemoryPublisher:
    return SharedMemoryPublisher(channel=channel, rank=rank, group=dist.group.WORLD, max_live=2, directory=directory)


def two_writers(rank: int, directory: Path) -> dict[str, Publication]:
    """Files are left for the parent process to read."""
    by_rows, by_columns = (publisher_in(directory, rank, channel) for channel in ("rows", "columns"))
    aliases = ((HEAD, EMBEDDING),)
    version = PolicyVersion(0, 1)
    return {
        "float32": by_rows.publish(version, fsdp_shards(rank, policy(1)), dtype=torch.float32, aliases=aliases),
        "bfloat16": by_columns.publish(version, column_shards(rank, policy(1)), dtype=torch.bfloat16, aliases=aliases),
    }


def writers_that_fail(rank: int, directory: Path) -> dict[str, Any]:
    """Errors of every rank, and what can be read of the last good version after each."""
    publisher, reader = publisher_in(directory, rank, "failing"), SharedMemoryReader()
    v1, v2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
    first = publisher.publish(v1, fsdp_shards(rank, policy(1)), dtype=torch.float32)

    def broken() -> Iterator[TensorShard]:
        yield from fsdp_shards(rank, policy(2))
        if rank == 1:
            raise RuntimeError("out of luck")

    def unwritable() -> Iterator[TensorShard]:
        for shard in fsdp_shards(rank, policy(2)):
            meta = rank == 1 and shard.name == ROW_CUT
            yield TensorShard(
                name=shard.name,
                data=shard.data.to("meta") if meta else shard.data,
                global_shape=shard.global_shape,
                offset=shard.offset,
            )

    def incomplete() -> Iterator[TensorShard]:
        return (shard for shard in fsdp_shards(rank, policy(2)) if rank == 0 or shard.name != ROW_CUT)

    def other_shape() -> Iterator[TensorShard]:
        yield TensorShard(name=NORM, data=torch.zeros(0), global_shape=(3 + rank,), offset=(0,))

    def publish(shards: Iterator[TensorShard], version: PolicyVersion = v2) -> Any:
        return lambda: publisher.publish(version, shards, dtype=torch.float32)

    errors = {
        "raising": error_of(publish(broken())),
        "unwritable": error_of(publish(unwritable())),
        "incomplete": error_of(publish(incomplete())),
        "other shape": error_of(publish(other_shape())),
        "other version": error_of(publish(fsdp_shards(rank, policy(2)), PolicyVersion(0, 2 + rank))),
    }
    intact = {name: torch.equal(tensor, policy(1)[name]) for name, tensor in reader.tensors(first)}
    second = publisher.publish(v2, fsdp_shards(rank, policy(2)), dtype=torch.float32)
    dist.barrier()
    read = {name: torch.equal(tensor, policy(2)[name]) for name, tensor in reader.tensors(second)}
    dist.barrier()
    publisher.close()
    dist.barrier()
    left = [path.name for path in directory.iterdir() if "failing" in path.name]
    return {"errors": errors, "intact": intact, "after": read, "left": left}


def verified_engines(rank: int, directory: Path) -> dict[str, Any]:
    """A tensor-parallel engine of two ranks: right, and wrong on one rank in several ways."""
    publisher = publisher_in(directory, rank, "verified")
    aliases = ((HEAD, EMBEDDING),)
    version = PolicyVersion(0, 3)
    publication = publisher.publish(version, fsdp_shards(rank, policy(3)), dtype=torch.float32, aliases=aliases)

    def check(damage: str = "", on: int = 1) -> Any:
        tensors = policy(3)
        tensors[HEAD] = tensors[EMBEDDING].clone()
        shards = list(column_shards(rank, tensors))
        if damage and rank == on:
            tensors[damage].view(-1).view(torch.int32)[-1] ^= 1 << 30
        return lambda: verify(publication, shards, dist.group.WORLD)

    def replicated_part(damaged: bool) -> Any:
        """Both ranks hold the same rows of the embedding's first half, and rank 0 counts the rest too."""
        tensors = policy(3)
        tensors[HEAD] = tensors[EMBEDDING]
        shards = [shard for shard in column_shards(rank, tensors) if shard.name != EMBEDDING]
        rows = tensors[EMBEDDING][:2].clone()
        if damaged and rank == 1:
            rows[1, 1] += 1
        box: dict[str, Any] = {"name": EMBEDDING, "global_shape": (5, 6)}
        shards.append(TensorShard(data=rows, offset=(0, 0), counted=rank == 0, **box))
        if rank == 0:
            shards.append(TensorShard(data=tensors[EMBEDDING][2:], offset=(2, 0), **box))
        return lambda: verify(publication, shards, dist.group.WORLD)

    result = {
        "fingerprint": check()(),
        "with replicated part": replicated_part(damaged=False)(),
        "errors": {
            "column shard": error_of(check(ROW_CUT)),
            "head": error_of(check(HEAD)),
            "counted norm": error_of(check(NORM, on=0)),
            "replicated norm": error_of(check(NORM, on=1)),
            "replicated part": error_of(replicated_part(damaged=True)),
        },
    }
    publisher.close()
    return result


def main() -> None:
    rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    join_world("gloo")
    scenarios = (two_writers, writers_that_fail, verified_engines, parallelism_pairs)
    results = {scenario.__name__: scenario(rank, directory) for scenario in scenarios}
    torch.save(results, f"{sys.argv[2]}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
