"""Program of test_trainer_hosts.py: ranks of a trainer on several hosts, which differ in the owner of their files.

    trainer_hosts.py DIRECTORY HOST OWNER [HOST OWNER …]     one rank for each; the ranks are forked

Every rank leaves what it published in `DIRECTORY/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from weight_examples import ALIASES, SHAPES, weights

from titan_rl.processes import OWNER
from titan_rl.types import PolicyVersion
from titan_rl.weights import exchange
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher

VERSIONS = 3
"""The third one is in the slot of the first."""


def shards(rank: int, ranks: int, tensors: dict[str, Tensor]) -> list[TensorShard]:
    """Rows or columns in turn; scalars, and what has too few rows, are one rank's."""
    found = []
    for number, (name, tensor) in enumerate(tensors.items()):
        dim = number % tensor.dim() if tensor.dim() else 0
        chunks = tensor.chunk(ranks, dim) if tensor.dim() and tensor.shape[dim] >= ranks else (tensor,)
        mine = (rank - number) % ranks
        if mine < len(chunks):
            offset = [0] * tensor.dim()
            if tensor.dim():
                offset[dim] = sum(chunk.shape[dim] for chunk in chunks[:mine])
            shape = tuple(tensor.shape)
            found.append(TensorShard(name=name, data=chunks[mine], global_shape=shape, offset=tuple(offset)))
    return found


def run(rank: int, hosts: list[str], directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), len(hosts))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(hosts), timeout=timedelta(seconds=60))
    exchange._ROUND_BYTES = 100_000  # many rounds, and boxes that are cut
    publisher = SharedMemoryPublisher(
        channel="hosts", rank=rank, group=dist.group.WORLD, max_live=2, hosts=hosts, directory=directory
    )
    published: list[Publication] = []
    for step in range(1, VERSIONS + 1):
        if step > 2:
            publisher.release(PolicyVersion(0, step - 2))
        published.append(
            publisher.publish(
                PolicyVersion(0, step),
                shards(rank, len(hosts), weights(step, SHAPES)),
                dtype=torch.bfloat16 if step == 2 else torch.float32,
                aliases=ALIASES,
            )
        )
    (directory / f"{rank}.pickle").write_bytes(pickle.dumps(published))
    dist.barrier()


def main() -> None:
    directory, places = Path(sys.argv[1]), sys.argv[2:]
    hosts, owners = places[::2], places[1::2]
    children = []
    for rank, owner in enumerate(owners):
        child = os.fork()
        if child == 0:
            os.environ[OWNER] = owner
            run(rank, hosts, directory)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitpid(child, 0)[1] for child in children) != 0)


if __name__ == "__main__":
    main()
