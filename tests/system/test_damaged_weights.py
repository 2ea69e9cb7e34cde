"""A real run whose publications are damaged in shared memory before anybody reads them (15 s; simulated engines)."""

from __future__ import annotations

import dataclasses
import io
import logging
from pathlib import Path
from typing import Any

from rich.console import Console

from titan_rl.config import EvaluationConfig, RunConfig
from titan_rl.config_registry import copy4
from titan_rl.loop.loop import TrainingLoop
from titan_rl.loop.system import System
from titan_rl.metrics.writer import MetricsWriter
from titan_rl.run.start import start
from titan_rl.view.display import RunDisplay
from titan_rl.weights.manifest import Publication
from titan_rl.weights.segment_files import segment_at

STEPS = 2


def small() -> RunConfig:
    recipe = copy4()
    return dataclasses.replace(
        recipe,
        loop=dataclasses.replace(recipe.loop, steps=STEPS, groups_per_step=4),
        rollout=dataclasses.replace(recipe.rollout, samples_per_group=4),
        evaluation=EvaluationConfig(every=0, prompts=10),
        generator=dataclasses.replace(recipe.generator, count=2, engine="simulated"),
    )


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
    said = io.StringIO()
    display = RunDisplay(steps=STEPS, live=False, console=Console(file=said, width=1000))
    with caplog.at_level(logging.WARNING, "titan_rl.loop"):
        async with start(small(), log_directory=tmp_path / "logs") as system:
            published = damaging(system, "policy v1")
            loop = TrainingLoop(system, display=display, metrics=MetricsWriter(tmp_path, tensorboard=False))
            summary = await loop.run()
            await loop.end(failed=False)
            fleet = await system.router.fleet_status()
    assert summary.steps == STEPS
    assert published == ["policy v0", "policy v1", "policy v1", "policy v2"]
    assert [(status.state, status.version) for status in fleet] == [("serving", "v2")] * 2
    for text in (said.getvalue(), caplog.text):
        lines = [line for line in text.splitlines() if "is not what was published" in line]
        (refused,) = (line for line in lines if "v1 is served by nobody" in line)
        assert "generator0: " in refused and "generator1: " in refused and "publishes its weights again" in refused
