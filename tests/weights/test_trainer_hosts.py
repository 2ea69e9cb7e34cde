"""A trainer over several hosts leaves the same publication on each of them. The hosts are ranks that differ in the
owner of their files (8 s)."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import Scenario, run_scenarios
from torch import Tensor
from weight_examples import SHAPES, TIED, copied, same_bytes, weights

from titan_rl.processes import OWNER, join_world
from titan_rl.types import PolicyVersion
from titan_rl.weights import publisher as publishing
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.puller import SharedMemoryReader
from titan_rl.weights.segment_files import segment_at

OWNERS = {"one": "101", "two": "102", "three": "103"}
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


def publish_on(hosts: tuple[str, ...], directory: Path) -> list[Publication]:
    """What the rank on each of these hosts publishes."""
    join_world("gloo")
    rank = dist.get_rank()
    os.environ[OWNER] = OWNERS[hosts[rank]]
    publishing._PIECE_BYTES = 100_000  # boxes that are cut
    publisher = SharedMemoryPublisher(
        channel="hosts", rank=rank, group=dist.group.WORLD, max_live=2, hosts=hosts, directory=directory
    )
    published = []
    for step in range(1, VERSIONS + 1):
        if step > 2:
            publisher.release(PolicyVersion(0, step - 2))
        parts = shards(rank, len(hosts), weights(step, SHAPES))
        dtype = torch.bfloat16 if step == 2 else torch.float32
        published.append(publisher.publish(PolicyVersion(0, step), parts, dtype=dtype, aliases=TIED))
    return published


@pytest.mark.parametrize(
    "hosts", [("one", "two"), ("one", "one", "two", "two"), ("two", "one", "two", "three")], ids=" ".join
)
def test_every_host_of_the_trainer_ends_with_the_whole_publication(
    hosts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(publish_on, len(hosts), {"hosts": hosts, "directory": tmp_path})
    (published,) = run_scenarios([scenario], tmp_path)
    assert all(ours == published[0] for ours in published)
    assert published[0][0].location == published[0][2].location
    assert published[0][0].hosts == tuple(dict.fromkeys(hosts))
    for publication in published[0][-2:]:
        segments = []
        for host in dict.fromkeys(hosts):
            monkeypatch.setenv(OWNER, OWNERS[host])
            dtype = torch.bfloat16 if publication.version.step == 2 else torch.float32
            expected = {name: each.to(dtype) for name, each in weights(publication.version.step, SHAPES).items()}
            assert same_bytes(copied(SharedMemoryReader().tensors(publication)), expected)
            segments.append(segment_at(publication.location))
        assert len({segment.stat().st_ino for segment in segments}) == len(set(hosts))
    assert published[0][-1].version.step == VERSIONS
