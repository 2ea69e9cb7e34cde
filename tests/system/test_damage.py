"""Real runs that lose a sample, forget one, or publish weights that are damaged before anybody reads them (30 s;
simulated engines)."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from titan_rl.config import EvaluationConfig, RunConfig
from titan_rl.config_registry import copy4
from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef
from titan_rl.data_plane.store import HeldReport
from titan_rl.errors import InvariantError
from titan_rl.loop.loop import TrainingLoop
from titan_rl.loop.system import System
from titan_rl.metrics.writer import MetricsWriter
from titan_rl.run.start import start
from titan_rl.types import GroupKey, GroupRequest
from titan_rl.view.display import RunDisplay
from titan_rl.weights.manifest import Publication
from titan_rl.weights.segment_files import segment_at

STEPS, GROUPS, SAMPLES = 3, 4, 4
VICTIM = 5
"""A group of the second step."""


def small(generators: int = 1, **loop: Any) -> RunConfig:
    recipe = copy4()
    return dataclasses.replace(
        recipe,
        loop=dataclasses.replace(recipe.loop, groups_per_step=GROUPS, **{"steps": STEPS, **loop}),
        rollout=dataclasses.replace(recipe.rollout, samples_per_group=SAMPLES),
        evaluation=EvaluationConfig(every=0, prompts=10),
        generator=dataclasses.replace(recipe.generator, count=generators, engine="simulated"),
    )


def make_loop(system: System, directory: Path) -> tuple[TrainingLoop, io.StringIO]:
    said = io.StringIO()
    display = RunDisplay(steps=STEPS, live=False, console=Console(file=said, width=1000))
    return TrainingLoop(system, display=display, metrics=MetricsWriter(directory, tensorboard=False)), said


def lose(system: System, victim: int) -> list[SampleBatch]:
    """Damage one stored sample of a group just before it is trained for the first time; batches that were trained."""
    batches: list[SampleBatch] = []
    damaged: list[SampleRef] = []
    train_step = system.trainer.train_step

    async def damaging(batch: SampleBatch, *kept: Any) -> dict[str, float]:
        batches.append(batch)
        found = [ref for ref in batch.refs if ref.group_id == victim]
        if found and not damaged:
            damaged.extend(found)
            ref = found[len(found) // 2]
            with open(ref.location, "r+b") as file:
                file.seek(ref.offset)
                file.write(b"damage")
        return await train_step(batch, *kept)

    system.trainer.train_step = damaging  # type: ignore[method-assign]
    return batches


def plays_of(system: System) -> list[GroupKey]:
    """What is played from now on."""
    keys: list[GroupKey] = []
    play = system.rollouts.run_group

    async def noted(request: GroupRequest) -> Any:
        keys.append(request.key)
        return await play(request)

    system.rollouts.run_group = noted  # type: ignore[method-assign]
    return keys


def forget(system: System, victim: int) -> None:
    """Let the release of one group never reach its store."""
    release = system.rollouts.release

    async def forgetful(batch: SampleBatch) -> list[HeldReport]:
        kept = [position for position, group_id in enumerate(batch.group_ids) if group_id != victim]
        return await release(batch.select(kept))

    system.rollouts.release = forgetful  # type: ignore[method-assign]


async def test_a_damaged_sample_costs_its_group_one_more_play_and_the_run_nothing(tmp_path: Path) -> None:
    async with start(small(max_staleness=1), log_directory=tmp_path / "logs") as system:
        batches, keys = lose(system, VICTIM), plays_of(system)
        loop, said = make_loop(system, tmp_path)
        summary = await loop.run()
        await loop.end(failed=False)
        assert not any(report.samples for report in await system.rollouts.held())
    assert summary.steps == STEPS
    train_keys = [key for key in keys if key.purpose == "train"]
    assert sorted(key.group_id for key in train_keys if not key.attempt) == list(range(STEPS * GROUPS))
    assert [key.group_id for key in train_keys if key.attempt] == [VICTIM]
    assert f"group {VICTIM} is played again" in said.getvalue()

    # The batch that was lost comes again in full, in its place, with other samples of the victim only.
    first, lost, again, last = (batch.refs for batch in batches)
    assert [(ref.group_id, ref.sample) for ref in again] == [(ref.group_id, ref.sample) for ref in lost]
    assert all((old == new) == (old.group_id != VICTIM) for old, new in zip(lost, again, strict=True))
    assert sorted({ref.group_id for ref in first + again + last}) == list(range(STEPS * GROUPS))
    assert {len(each) for each in (first, lost, again, last)} == {GROUPS * SAMPLES}

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["groups/lost"] for line in lines if "groups/lost" in line] == [0, 1, 1]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3]


async def test_a_sample_that_nobody_releases_ends_the_run_with_its_name(tmp_path: Path) -> None:
    async with start(small(), log_directory=tmp_path / "logs") as system:
        forget(system, VICTIM)
        loop, _ = make_loop(system, tmp_path)
        (store,) = system.rollouts.stores
        await loop.run()
        with pytest.raises(InvariantError) as error:
            await loop.end(failed=False)
    assert f"{store}: {SAMPLES} samples of group {VICTIM}, " in str(error.value)
    assert str(error.value).count("samples of group") == 1
    assert not list(Path("/dev/shm").glob(f"titan_rl-{os.getpid()}-*"))


def damage(publication: Publication) -> None:
    """Flip one bit of one tensor."""
    entry = publication.manifest.entries[len(publication.manifest.entries) // 2]
    with open(segment_at(publication.location), "r+b") as segment:
        segment.seek(entry.offset)
        byte = segment.read(1)[0]
        segment.seek(entry.offset)
        segment.write(bytes([byte ^ 1]))


def damaging(system: System, *names: str) -> list[str]:
    """Damage the first publication of each of these names; all that are published from now on."""
    published: list[str] = []
    push = system.trainer.push_model_state_dict

    async def push_model_state_dict() -> Publication:
        publication = await push()
        name = f"{publication.channel} {publication.version}"
        if name in names and name not in published:
            damage(publication)
        published.append(name)
        return publication

    system.trainer.push_model_state_dict = push_model_state_dict  # type: ignore[method-assign]
    return published


async def test_weights_that_every_generator_refuses_are_published_again(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "titan_rl.loop"):
        async with start(small(2, steps=2), log_directory=tmp_path / "logs") as system:
            published = damaging(system, "policy v1")
            loop, said = make_loop(system, tmp_path)
            summary = await loop.run()
            await loop.end(failed=False)
            fleet = await system.router.fleet_status()
    assert summary.steps == 2
    assert published == ["policy v0", "policy v1", "policy v1", "policy v2"]
    assert [(status.state, status.version) for status in fleet] == [("serving", "v2")] * 2
    for text in (said.getvalue(), caplog.text):
        lines = [line for line in text.splitlines() if "is not what was published" in line]
        *_, refused = (line for line in lines if "v1 is served by nobody" in line)  # said again with each that refuses
        assert "generator0: " in refused and "generator1: " in refused and "publishes its weights again" in refused
