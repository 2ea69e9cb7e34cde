"""Samples that are missing or damaged: every rank is told of every lost group, and nothing else happens (15 s)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from policy_scenarios import mixed_batch, on_layout, shards_of, train, trainer, updater
from support.ranks import run_scenarios

from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef
from titan_rl.data_plane.store import SampleStore, SharedMemorySource
from titan_rl.errors import SampleError, SamplesLost
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import TrainingSample

LAYOUTS = [(2, 1), (1, 2)]
"""FSDP ranks, TP ranks."""
LOST = {"damaged": (1, 4, 7, 8, 10), "missing": (0, 9), "one sample": (5,), "everything": tuple(range(11))}
ON_RANK_1 = (0, 1, 2, 3, 8, 9)


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
    """Steps on batches with holes, then a step on the good one; and that step alone."""
    config = trainer(data_parallel, tensor_parallel)
    clean = updater(model_path, config)
    result: dict[str, Any] = {"clean metrics": train(clean, good), "clean": shards_of(clean)}

    policy = updater(model_path, config)
    result["before"] = shards_of(policy)
    for name, batch in bad.items():
        result[name] = lost_of(lambda batch=batch: train(policy, batch))
    result["after"], result["step"] = shards_of(policy), policy.step
    result["next metrics"] = train_share(policy, good, dist.get_rank() // tensor_parallel)
    result["next"] = shards_of(policy)

    one_sided = updater(model_path, config)
    one_sided.samples = LostOnRank1(lost_on_rank_1)
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


def stored(store: SampleStore, batch: SampleBatch) -> SampleBatch:
    return SampleBatch.of(store.put(batch.samples))


def damage(ref: SampleRef) -> None:
    with open(ref.location, "r+b") as file:
        file.seek(ref.offset + ref.nbytes // 2)
        file.write(b"\xa5" * 8)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SampleBatch]]:
    """A whole one and those with holes, of the same samples."""
    directory = tmp_path_factory.mktemp("stores")
    samples = mixed_batch()
    stores = {name: SampleStore(name.replace(" ", "_"), owner_pid=1, directory=directory) for name in ("good", *LOST)}
    found = {name: stored(store, samples) for name, store in stores.items()}
    for ref in found["damaged"].refs:
        if ref.group_id in LOST["damaged"]:
            damage(ref)
    damage(next(ref for ref in found["one sample"].refs if ref.group_id == 5 and ref.sample == 1))
    stores["everything"].close()
    gone = SampleStore("gone", owner_pid=1, directory=directory)
    holes = stored(gone, samples)
    gone.close()
    found["missing"] = SampleBatch.of(
        hole if hole.group_id in LOST["missing"] else ref
        for hole, ref in zip(holes.refs, found["missing"].refs, strict=True)
    )
    yield found
    for store in stores.values():
        store.close()


@pytest.fixture(scope="module")
def results(batches: dict[str, SampleBatch], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    model_path = make_tiny_policy(TinyPolicyConfig(), tmp_path_factory.mktemp("cache"))
    scenarios = {
        layout: on_layout(
            lost_samples,
            layout,
            model_path=str(model_path),
            good=batches["good"],
            bad={name: batches[name] for name in LOST},
            lost_on_rank_1=list(ON_RANK_1),
        )
        for layout in LAYOUTS
    }
    directory = tmp_path_factory.mktemp("ranks")
    return dict(zip(scenarios, run_scenarios(list(scenarios.values()), directory), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("batch", LOST)
def test_every_rank_names_every_lost_group(results: dict[Any, list[Any]], layout: tuple[int, int], batch: str) -> None:
    first, second = (rank[batch] for rank in results[layout])
    assert first == second
    message, group_ids = first
    assert group_ids == LOST[batch]
    assert all(str(group_id) in message for group_id in group_ids)
    assert "the weights were not changed" in message


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_weights_are_untouched_and_the_next_step_is_as_if_nothing_had_been(
    results: dict[Any, list[Any]], layout: tuple[int, int]
) -> None:
    for rank in results[layout]:
        assert rank["step"] == 0
        for kept, wanted in (("after", "before"), ("next", "clean")):
            for shard, other in zip(rank[kept], rank[wanted], strict=True):
                np.testing.assert_array_equal(shard[1], other[1])
        assert rank["next metrics"] == rank["clean metrics"]


def test_what_one_of_two_tensor_parallel_ranks_misses_is_lost_to_both(results: dict[Any, list[Any]]) -> None:
    assert [rank["on rank 1"][1] for rank in results[1, 2]] == [ON_RANK_1] * 2


def test_what_one_of_two_data_parallel_ranks_misses_is_lost_to_both(results: dict[Any, list[Any]]) -> None:
    first, second = (rank["on rank 1"][1] for rank in results[2, 1])
    assert first == second
    assert first and set(first) <= set(ON_RANK_1)
