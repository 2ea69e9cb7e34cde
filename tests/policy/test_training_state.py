"""A trainer's state, written beside training and read in every layout of ranks. About 20 s on two free cores."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_scenarios import assemble, batch_of, on_layout, shards_of, train, trainer, updater
from support.ranks import Results, Scenario, cells

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import CheckpointError, StorageError
from titan_rl.policy.config import KLConfig, OptimizerConfig, TinyPolicyConfig, TrainerConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.policy.training_state import WEIGHTS, StateWriter, read_state, read_tensors
from titan_rl.weights.manifest import TensorShard

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Data parallel, tensor parallel. 13 tokens of vocabulary are divided unevenly in each but the first."""
OTHERS = [((2, 2), (1, 1)), ((2, 2), (2, 1)), ((2, 2), (1, 2)), ((1, 1), (2, 2))]
"""Written by the first, read by the second."""
IN_CI = [((2, 2), (2, 2)), OTHERS[0], OTHERS[-1]]

SAVED_AT, STEPS = 2, 4
SAMPLES = 8
"""Of each batch: the state holds nothing of them."""

Outcome = dict[str, Any]


def config(data_parallel: int, tensor_parallel: int) -> TrainerConfig:
    rates = OptimizerConfig(lr=1e-3, warmup_steps=3, decay_ratio=0.5, min_lr_factor=0.1)
    return trainer(data_parallel, tensor_parallel, optimizer=rates, kl=KLConfig(coefficient=0.1))


def few(step: int) -> SampleBatch:
    return batch_of(step).select(range(SAMPLES))


def steps(policy: Any, first: int) -> list[dict[str, float]]:
    return [train(policy, few(step)) for step in range(first, STEPS)]


def save(model_path: str, directory: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    """Train on while the state is being written, for the second time."""
    policy = updater(model_path, config(data_parallel, tensor_parallel))
    policy.freeze_reference()
    for step in range(SAVED_AT):
        train(policy, few(step))
        if not step:
            policy.begin_save(Path(f"{directory}, before"))
    before = shards_of(policy)
    policy.begin_save(Path(directory))
    reports = steps(policy, SAVED_AT)
    policy.finish_save()
    return {"saved": before, "end": shards_of(policy), "reports": reports}


def restore(model_path: str, directory: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    policy = updater(model_path, config(data_parallel, tensor_parallel))
    policy.restore(Path(directory), 1)
    where = (policy.incarnation, policy.step)
    before = shards_of(policy)
    reports = steps(policy, SAVED_AT)
    return {"saved": before, "end": shards_of(policy), "reports": reports, "where": where}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def ways(directory: Path) -> tuple[Results, Results]:
    """By layout, what was saved; by the layout that saved it and the one that reads it, what was restored. In the first
    start of ranks is what can be restored there: at most as many saved it. In the second is the rest."""
    model = str(make_tiny_policy(TinyPolicyConfig(), directory / "policy"))

    def scenario(function: Any, written: tuple[int, int], layout: tuple[int, int]) -> Scenario:
        return on_layout(function, layout, directory=f"{directory}/{written}", model_path=model)

    for name in ("first", "second"):
        (directory / name).mkdir()
    saving = {layout: scenario(save, layout, layout) for layout in LAYOUTS}
    pairs = [*((layout, layout) for layout in LAYOUTS), *OTHERS]
    restoring = {pair: scenario(restore, *pair) for pair in pairs}
    early = {pair: restoring.pop(pair) for pair in pairs if math.prod(pair[0]) <= math.prod(pair[1])}
    return (
        Results({**saving, **early}, {(1, 1), (2, 2), *IN_CI}, directory / "first"),
        Results(restoring, IN_CI, directory / "second"),
    )


def outcome(ranks: list[Outcome]) -> Outcome:
    """Rank 0's, with the weights of all."""
    return ranks[0] | {moment: assemble([rank[moment] for rank in ranks]) for moment in ("saved", "end")}


def saved_and_restored(
    ways: tuple[Results, Results], written: tuple[int, int], layout: tuple[int, int]
) -> tuple[Outcome, Outcome]:
    early = math.prod(written) <= math.prod(layout)
    for each in [written] if (written, layout) in IN_CI else LAYOUTS:
        ways[0][each]  # what is restored together must have been saved
    return outcome(ways[0][written]), outcome(ways[0 if early else 1][written, layout])


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("layout", cells(LAYOUTS, ci=[(2, 2)]))
def test_the_same_layout_goes_on_bit_for_bit(ways, layout):
    saved, restored = saved_and_restored(ways, layout, layout)
    assert restored["where"] == (1, SAVED_AT)
    assert_same(saved["saved"], restored["saved"])
    assert_same(saved["end"], restored["end"])
    assert saved["reports"] == restored["reports"]


@pytest.mark.parametrize("layouts", cells(OTHERS, ci=[OTHERS[0], OTHERS[-1]]), ids=str)
def test_another_layout_reads_the_same_bits_and_goes_on_closely(ways, layouts):
    written, layout = layouts
    saved, restored = saved_and_restored(ways, written, layout)
    assert_same(saved["saved"], restored["saved"])
    for name, end in saved["end"].items():
        moved = np.abs(end - saved["saved"][name]).max()
        assert np.abs(end - restored["end"][name]).max() < 0.02 * moved, name
    assert saved["reports"][-1]["reference_kl_k3"] == pytest.approx(
        restored["reports"][-1]["reference_kl_k3"], rel=1e-3
    )
    assert saved["reports"][-1]["lr"] == restored["reports"][-1]["lr"]


def test_the_whole_weights_are_read_without_ranks(ways, directory):
    saved = outcome(ways[0][2, 2])["saved"]
    assert_same(saved, {name: tensor.numpy() for name, tensor in read_tensors(directory / "(2, 2)", WEIGHTS).items()})


def shards(**tensors: torch.Tensor) -> list[TensorShard]:
    return [TensorShard.whole(f"model.{name}", tensor) for name, tensor in tensors.items()]


def test_a_state_that_cannot_be_written_or_read_is_an_error_of_ours(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    writer = StateWriter(0)
    with pytest.raises(StorageError, match="could not be written: "):
        writer.begin(shards(a=torch.ones(3)), tmp_path / "full")
        writer.finish()
    writer.begin(shards(a=torch.ones(3)), tmp_path / "state")
    writer.finish()
    with pytest.raises(CheckpointError, match="cannot be read: .*model.b"):
        read_state(shards(b=torch.ones(3)), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"model.a is \(3,\), not \(4,\)"):
        read_state(shards(a=torch.ones(4)), tmp_path / "state")


def test_a_state_without_room_for_its_copy_is_an_error_of_ours(tmp_path):
    memory = torch.empty(1).expand(1 << 50)  # more than there is address space for
    with pytest.raises(StorageError, match="no memory for a copy of the state"):
        StateWriter(0).begin([TensorShard.whole("a", memory)], tmp_path)


def test_a_state_that_lacks_a_ranks_part_is_refused(tmp_path):
    """One of two ranks wrote its half."""
    half = TensorShard(name="model.a", data=torch.ones(2, 3), global_shape=(4, 3), offset=(2, 0))
    writer = StateWriter(1)
    writer.begin([half], tmp_path)
    writer.finish()
    mine = TensorShard(name="model.a", data=torch.zeros(1, 2), global_shape=(4, 3), offset=(3, 1))
    read_state([mine], tmp_path)
    assert mine.data.tolist() == [[1.0, 1.0]]
    with pytest.raises(CheckpointError, match="it lacks 6 elements of model.a"):
        read_tensors(tmp_path, WEIGHTS)


class Evil:
    """Whoever unpickles it makes a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_what_the_files_of_a_state_say_is_not_run(tmp_path):
    evil = Evil(tmp_path / "mark")
    for way, write in {"pickle": pickle.dump, "torch": torch.save}.items():
        (tmp_path / way).mkdir()
        with open(tmp_path / way / "rank-0.safetensors", "wb") as file:
            write(evil, file)
        with pytest.raises(CheckpointError, match="rank-0.safetensors cannot be read: "):
            read_state(shards(a=torch.ones(3)), tmp_path / way)
    assert not Path(evil.mark).exists()
