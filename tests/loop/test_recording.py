"""Rollouts are recorded once, whatever fails beside them, and a failing recorder costs sentences only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted_system import World
from test_checkpoints import killed_at_step_2, written

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TrainingError
from titan_rl.loop.recording import choose
from titan_rl.metrics.json_lines import json_lines
from titan_rl.metrics.rollout_record import ROLLOUTS, RolloutRecord, RolloutWriter, read_records
from titan_rl.rollout.report import GroupReport
from titan_rl.types import Purpose


def recorded(directory: Path) -> list[tuple[str, int, str]]:
    return [(each.purpose, each.step, why) for each in read_records(directory / ROLLOUTS) for why in each.kept]


def of_step(step: int, reward: float = 0.0) -> RolloutRecord:
    return RolloutRecord(purpose=Purpose.TRAIN, group=0, sample=0, step=step, reward=reward)


def steps(directory: Path) -> list[int]:
    return [line["step"] for _, line in json_lines(directory / ROLLOUTS, strict=True)]


def of_steps(*steps: int) -> list[tuple[str, int, str]]:
    return [("train", step, why) for step in steps for why in ("best", "random", "worst")]


async def saved(world: World) -> None:
    await world.run()
    await world.loop.save()  # as every run does at its end


async def test_every_step_has_its_best_worst_and_random_rollout_and_every_evaluation_its_first(tmp_path: Path):
    world = World(steps=3, every=2, directory=tmp_path, recorded=True)
    await saved(world)
    found = recorded(tmp_path)
    assert sorted(each for each in found if each[0] == "train") == of_steps(1, 2, 3)
    assert [each[1:] for each in found if each[0] == "evaluate"] == [(step, "right") for step in (0, 0, 2, 2, 3, 3)]


def test_now_and_then_a_whole_group_is_recorded():
    def report(group: int) -> GroupReport:
        made = [RolloutRecord(purpose=Purpose.TRAIN, group=group, sample=sample) for sample in range(9)]
        return GroupReport(group_id=group, purpose=Purpose.TRAIN, attempt=0, rollouts=(*made,), samples=SampleBatch(()))

    reports = [report(7), report(8)]
    assert len(choose(19, reports, 1)) <= 3
    whole = {(each.group, each.sample) for each in choose(20, reports, 1) if "group" in each.kept}
    assert whole in ({(group, sample) for sample in range(9)} for group in (7, 8))
    assert choose(20, reports, 0) == []


async def test_a_run_that_goes_on_records_no_step_twice(tmp_path: Path):
    world = World(steps=4, directory=tmp_path, recorded=True, checkpoint_every=2)
    world.script.errors["publish v3"] = [TrainingError("the disk burns")]
    with pytest.raises(TrainingError):
        await world.run()
    await written(tmp_path, 2)
    assert recorded(tmp_path)[-1][1] == 3
    again = World(steps=4, directory=tmp_path, recorded=True, restore=True)
    await saved(again)
    assert sorted(each for each in recorded(tmp_path) if each[0] == "train") == of_steps(1, 2, 3, 4)


async def test_a_worker_that_is_gone_costs_its_rollouts_and_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def gone(chosen: object, reports: object) -> list[RolloutRecord]:
        return []

    world = World(steps=3, directory=tmp_path, recorded=True)
    monkeypatch.setattr(world.rollouts, "describe", gone)
    await saved(world)
    assert world.printed.count("rollouts are missing, the run goes on: ActorGone: step 1: the worker") == 1
    assert recorded(tmp_path) == []


async def test_a_step_does_not_wait_for_the_recording_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    world = World(steps=3, directory=tmp_path, recorded=True, checkpoint_every=100)
    answer, ask = asyncio.Event(), world.rollouts.describe

    async def stopped(chosen: Any, reports: Any) -> Any:
        if world.trainer.step == 3:
            answer.set()
        if not chosen[0].evaluated:
            await answer.wait()
        return await ask(chosen, reports)

    monkeypatch.setattr(world.rollouts, "describe", stopped)
    await asyncio.wait_for(saved(world), 20)
    assert sorted(each for each in recorded(tmp_path) if each[0] == "train") == of_steps(1, 2, 3)


async def test_a_full_disk_costs_lines_and_one_sentence(tmp_path: Path):
    (tmp_path / ROLLOUTS).symlink_to("/dev/full")
    world = World(steps=3, directory=tmp_path, recorded=True)
    await saved(world)
    assert world.printed.count("rollouts are missing, the run goes on: OSError: [Errno 28]") == 1


def test_lines_after_the_checkpoint_are_cut_off_and_a_torn_line_is_skipped(tmp_path: Path):
    writer = RolloutWriter(tmp_path, warn=pytest.fail)
    writer.write([of_step(1)])
    kept = writer.nbytes
    writer.write([of_step(2), of_step(3)])
    with open(tmp_path / ROLLOUTS, "a") as file:
        file.write('{"step"')
    assert steps(tmp_path) == [1, 2, 3]
    RolloutWriter(tmp_path, keep_bytes=kept, warn=pytest.fail).write([of_step(9)])
    assert steps(tmp_path) == [1, 9]


def test_a_file_that_was_removed_is_made_again_and_said_once(tmp_path: Path):
    said: list[str] = []
    writer = RolloutWriter(tmp_path, warn=said.append)
    for step in (1, 2, 3):
        writer.write([of_step(step)])
        if step < 3:
            (tmp_path / ROLLOUTS).unlink()
    assert steps(tmp_path) == [3] and len(said) == 1 and "FileNotFoundError" in said[0]


def test_a_value_that_is_no_json_costs_its_lines(tmp_path: Path):
    said: list[str] = []
    writer = RolloutWriter(tmp_path, warn=said.append)
    writer.write([of_step(1, reward=float("nan"))])
    writer.write([of_step(2)])
    assert steps(tmp_path) == [2] and len(said) == 1


async def test_a_replay_plays_finished_groups_again_and_ends_after_its_step(tmp_path: Path):
    await killed_at_step_2(tmp_path)
    world = World(steps=6, staleness=2, every=1, directory=tmp_path, restore=True)
    finished = sorted(world.loop.ledger.reports)
    assert finished
    evaluations = len(world.loop.summary.evaluations)
    world.loop.ledger.replay(3, 6)
    summary = await asyncio.wait_for(world.run(), 20)
    assert summary.steps == 3 and len(summary.evaluations) == evaluations
    assert set(finished) <= {request.group_id for request in world.rollouts.started}
    assert world.rollouts.owned == {}
