"""What ranks do when samples that they are to train on are missing or damaged."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from policy_scenarios import shards_of, train, trainer, updater

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SharedMemorySource
from titan_rl.errors import SampleError, SamplesLost
from titan_rl.types import TrainingSample


class LostOnRank1:
    """Shared memory in which rank 1, and only it, misses some groups."""

    def __init__(self, group_ids: list[int]) -> None:
        self._source = SharedMemorySource()
        self._lost = group_ids if dist.get_rank() == 1 else []

    def fetch(self, batch: SampleBatch) -> tuple[TrainingSample, ...]:
        for group_id in batch.group_ids:
            if group_id in self._lost:
                raise SampleError("not here", group_id, 0)
        return self._source.fetch(batch)


def lost_samples(
    model_path: str,
    data_parallel: int,
    tensor_parallel: int,
    good: SampleBatch,
    bad: dict[str, SampleBatch],
    lost_on_rank_1: list[int],
) -> dict[str, Any]:
    """Steps and scores on batches with holes, then a step on the good one; and that step alone."""
    config = trainer(data_parallel, tensor_parallel)
    clean = updater(model_path, config)
    result: dict[str, Any] = {"clean metrics": train(clean, good), "clean": shards_of(clean)}

    policy = updater(model_path, config)
    result["before"] = shards_of(policy)
    for name, batch in bad.items():
        result[name] = lost_of(lambda batch=batch: train(policy, batch))
        result[name, "scored"] = lost_of(lambda batch=batch: policy.logprobs(batch))
    result["after"], result["step"] = shards_of(policy), policy.step
    result["next metrics"] = train_share(policy, good, dist.get_rank() // tensor_parallel)
    result["next"] = shards_of(policy)

    one_sided = updater(model_path, config, samples=LostOnRank1(lost_on_rank_1))
    result["on rank 1"] = lost_of(lambda: train(one_sided, good))
    return result


def train_share(policy: Any, batch: SampleBatch, data_rank: int) -> dict[str, float]:
    """One step of which this rank has its own samples only, as the controller hands them out."""
    positions, share = policy.plan(batch).share(data_rank)
    return policy.train_step(batch.select(positions), share)


def lost_of(action: Any) -> tuple[str, tuple[int, ...]]:
    """What was said to be lost, and which groups."""
    try:
        action()
    except SamplesLost as error:
        return str(error), error.group_ids
    return "nothing was lost", ()
