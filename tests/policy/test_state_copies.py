"""Copies of a rank's state in memory: what is usable and what is not, and that a step which is done again after a death
at any moment gives the same bits. About 10 s."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from policy_scenarios import batch_of, shards_of, train, trainer, updater

from titan_rl.errors import CheckpointError, StorageError
from titan_rl.policy import state_copies
from titan_rl.policy.config import KLConfig, OptimizerConfig, TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.policy.state_copies import StateCopies
from titan_rl.types import PolicyVersion

V0, V1, V2, V3 = (PolicyVersion(0, step) for step in range(4))


def copies_in(directory: Path, ranks: int = 1) -> StateCopies:
    return StateCopies(owner_pid=4242, rank=0, ranks=ranks, directory=directory)


def state(value: float) -> list[torch.Tensor]:
    """A scalar, an empty tensor, a strided one, one of several batches."""
    return [
        torch.tensor(value),
        torch.zeros(0, 3),
        torch.full((6, 4), value)[:, ::2],
        torch.full((5, 100_000), value, dtype=torch.float32),
    ]


def read(copies: StateCopies, version: PolicyVersion, reference: bool = False) -> list[float]:
    """The value of every tensor, the reference's last."""
    into, frozen = state(-1.0), [torch.zeros(3)] if reference else []
    copies.read(version, into, frozen)
    values = [set(tensor.flatten().tolist()) for tensor in (*into, *frozen) if tensor.numel()]
    assert all(len(each) == 1 for each in values)
    return [each.pop() for each in values]


def test_a_successor_reads_the_last_two_steps_and_the_reference(tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    copies.write(V0, state(0.0), [torch.full((3,), 9.0)])
    for step in (1, 2, 3):
        copies.write(PolicyVersion(0, step), state(float(step)))
    successor = copies_in(tmp_path)
    assert read(successor, V3, reference=True) == [3.0, 3.0, 3.0, 9.0]
    assert read(successor, V2) == [2.0, 2.0, 2.0]
    with pytest.raises(CheckpointError, match="rank 0: the copy at .*-1 is of v3, not of v1$"):
        read(successor, V1)
    successor.write(PolicyVersion(1, 3), state(5.0))
    assert read(copies_in(tmp_path), PolicyVersion(1, 3)) == [5.0, 5.0, 5.0]
    with pytest.raises(CheckpointError, match="-2 is of v0, not of v1.0"):
        read(copies_in(tmp_path), PolicyVersion(1, 3), reference=True)


def test_a_successor_writes_into_the_memory_that_is_there(tmp_path: Path) -> None:
    copies_in(tmp_path).write(V0, state(0.0))
    before = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    copies_in(tmp_path).write(V1, state(1.0))
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == before and len(before) == 2


def test_without_copies_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no copy at"):
        read(copies_in(tmp_path), V0)


def test_a_copy_of_another_layout_is_refused(tmp_path: Path) -> None:
    copies_in(tmp_path).write(V0, [torch.zeros(4, 8)])
    with pytest.raises(CheckpointError, match="damaged"):
        copies_in(tmp_path).read(V0, [torch.zeros(8, 4)])
    with pytest.raises(CheckpointError, match="no copy"):
        copies_in(tmp_path).read(V0, [torch.zeros(8, 400)])


@pytest.mark.parametrize("place", [0, 16, 30, 64, 3000, -1])
def test_one_changed_byte_is_noticed_and_nothing_is_read(tmp_path: Path, place: int) -> None:
    copies_in(tmp_path).write(V1, state(1.0))
    (path,) = tmp_path.glob("*-1")
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    into = state(-1.0)
    with pytest.raises(CheckpointError, match="torn|is of v|damaged"):
        copies_in(tmp_path).read(V1, into)
    assert into[0] == -1.0


def test_too_little_room_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"MiB, for two copies .* more than half of the [\d,]+ MiB that are free in"):
        copies_in(tmp_path, ranks=10**9).write(V0, state(0.0))
    assert list(tmp_path.iterdir()) == []


def test_a_large_state_on_a_device_is_not_copied_in_every_step(tmp_path: Path) -> None:
    large = torch.empty(state_copies.MOST_FROM_DEVICE // 4 + 1, device="meta")
    with pytest.raises(StorageError, match="every step would wait until 8 GiB of each rank were copied"):
        copies_in(tmp_path).write(V0, [large])
    assert list(tmp_path.iterdir()) == []


def test_what_comes_from_a_device_comes_into_locked_pages_or_all_ranks_hear_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []
    copies_in(tmp_path).write(V0, state(0.0))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    lock = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: SimpleNamespace(value=locked.append(nbytes) or len(locked) > 2),
        cudaHostUnregister=lambda address: None,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: lock)
    copies = copies_in(tmp_path)
    for step in (1, 2, 3):
        copies.write(PolicyVersion(0, step), state(float(step)))
    assert locked == [path.stat().st_size for path in tmp_path.iterdir()], "each slot once"
    with pytest.raises(CheckpointError, match="rank 0: CUDA cannot lock the 1 MiB"):
        read(copies_in(tmp_path), V3)


class Death(BaseException):
    """What a SIGKILL is to those who look at the files afterwards."""


def dying_after(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next copy ends after so many batches."""
    real = state_copies._batches

    def fewer(*args: Any) -> Iterator[Any]:
        yield from itertools.islice(real(*args), batches)
        monkeypatch.undo()
        raise Death

    monkeypatch.setattr(state_copies, "_batches", fewer)


def test_a_torn_copy_is_not_read_and_the_one_before_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for batches in range(4):
        copies = copies_in(tmp_path)
        copies.write(V1, state(1.0))
        copies.write(V2, state(2.0))
        dying_after(batches, monkeypatch)
        with pytest.raises(Death):
            copies.write(V3, state(3.0))
        assert read(copies_in(tmp_path), V2) == [2.0, 2.0, 2.0]
        with pytest.raises(CheckpointError, match="torn"):
            read(copies_in(tmp_path), V3)


STEPS = 4


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes ranks of a world of one that have loaded the same policy."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = str(make_tiny_policy(TinyPolicyConfig(), tmp_path / "policy"))
    rates = OptimizerConfig(lr=1e-3, warmup_steps=3, decay_ratio=0.5, min_lr_factor=0.1)
    config = trainer(1, 1, optimizer=rates, kl=KLConfig(coefficient=0.1))
    yield lambda coefficient: updater(model, dataclasses.replace(config, kl=KLConfig(coefficient=coefficient)))
    dist.destroy_process_group()


def report_of(policy: Any, step: int) -> dict[str, float]:
    return train(policy, batch_of(step))


@pytest.mark.parametrize("coefficient", [0.1, 0.0])
def test_a_step_that_is_done_again_after_a_death_gives_the_same_bits(
    policies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coefficient: float
) -> None:
    """The rank dies in every step: before the copy, in the middle of it, or after it, when nobody has heard."""
    undisturbed = policies(coefficient)
    if coefficient:
        undisturbed.freeze_reference()
    expected = [report_of(undisturbed, step) for step in range(STEPS)]

    policy, copies = policies(coefficient), copies_in(tmp_path)
    if coefficient:
        policy.freeze_reference()
    policy.copy_state(copies, reference=True)
    for step, batches in zip(range(STEPS), (None, 0, 1, 99), strict=True):
        report_of(policy, step)
        if batches == 99:
            policy.copy_state(copies)
        elif batches is not None:
            dying_after(batches, monkeypatch)
            with pytest.raises(Death):
                policy.copy_state(copies)
        policy, copies = policies(coefficient), copies_in(tmp_path)
        policy.restore_from_copies(copies, PolicyVersion(0, step))
        assert report_of(policy, step) == expected[step]
        policy.copy_state(copies)
    for one, other in zip(shards_of(policy), shards_of(undisturbed), strict=True):
        np.testing.assert_array_equal(one[1], other[1], err_msg=one[0])
