"""What timelines cost: CPU seconds and wall time of copy4's steps with `logging.spans` ÷ without.

    python scripts/bench/timeline.py [--pairs 20] [--steps 10]

Two systems of one trainer, one generator and one rollout worker are up at once, one with timelines and one without.
They take turns, so that a change of the machine's speed hits both, and who begins alternates. All processes of a system
count, the controller's part too; ratios are medians over the pairs. CPU time is what matters where steps keep all cores
busy, and is less disturbed by other work than wall time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from parts.table import print_report

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.controller.idle import IdleShares
from titan_rl.controller.system import System
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.launch.start import start
from titan_rl.observability.activity import Activities, activity
from titan_rl.observability.timeline import SPANS, Timeline, timeline
from titan_rl.observability.waits import answer_signals
from titan_rl.weights.manifest import Publication


def config_for(spans: bool) -> RunConfig:
    recipe = copy4()
    return dataclasses.replace(
        recipe,
        generator=dataclasses.replace(recipe.generator, count=1),
        logging=dataclasses.replace(recipe.logging, spans=spans),
    )


class Side:
    """One of the two systems, in the middle of its training."""

    def __init__(self, system: System, directory: Path, spans: bool) -> None:
        self._system = system
        self._directory = directory
        self._spans = spans
        self._idle = IdleShares()
        self._publication: Publication
        self._step = 0
        self._pids = [pid for pids in system.pids.values() for pid in pids] + [os.getpid()]

    async def begin(self) -> None:
        self._publication = await self._system.trainer.push_model_state_dict()
        await self._system.router.pull_model_state_dict(self._publication)

    async def turn(self, steps: int) -> tuple[float, float]:
        """Train some steps; returns CPU and wall seconds per step."""
        if self._spans:
            timeline.begin(self._directory / SPANS, "controller")
            timeline.follow(lambda: "the meshes")
        cpu, wall = sum(map(cpu_seconds, self._pids)), time.perf_counter()
        for _ in range(steps):
            await self._train()
        cpu, wall = sum(map(cpu_seconds, self._pids)) - cpu, time.perf_counter() - wall
        timeline.end()
        return cpu / steps, wall / steps

    async def _train(self) -> None:
        system, groups = self._system, self._system.config.loop.groups_per_step
        first, self._step = self._step * groups, self._step + 1

        async def play(prompt: int):
            with activity("rollout", group=prompt, attempt=0):
                return await system.rollouts.run_group(system.train_group(prompt, self._publication.version))

        reports = await asyncio.gather(*map(play, range(first, first + groups)))
        batch = SampleBatch.concat(report.samples for report in reports)
        with activity("train", step=self._step, samples=len(batch)):
            await system.trainer.train_step(batch)
        await system.rollouts.release(batch)
        self._idle.take(system)
        with activity("publish"):
            before, self._publication = self._publication, await system.trainer.push_model_state_dict()
        with activity("pull", version=self._publication.version):
            await system.router.pull_model_state_dict(self._publication)
        await system.trainer.release(before)


def cpu_seconds(pid: int) -> float:
    """Of a process, all its threads."""
    return time.clock_gettime((~pid << 3) | 2)


def microseconds(directory: Path, times: int = 100_000) -> tuple[float, float]:
    """Of one turn of a main lane, and of one span, writing included."""
    mine = Timeline()
    mine.begin(directory, "alone")
    spans = Activities(mine)
    began = time.process_time()
    for _ in range(times // 2):
        mine.doing("decode")
        mine.doing("wait", "rollouts")
    mine.write()
    turned = time.process_time()
    for number in range(times // 10):
        with spans("rollout", group=number):
            pass
    mine.write()
    spanned = time.process_time()
    mine.end()
    return (turned - began) / times * 1e6, (spanned - turned) / (times // 10) * 1e6


async def measure(pairs: int, steps: int, directory: Path) -> None:
    ratios: list[tuple[float, float]] = []
    async with AsyncExitStack() as stack:
        sides = []
        for spans in (True, False):
            where = directory / ("with" if spans else "without")
            system = await stack.enter_async_context(start(config_for(spans), log_directory=where / "logs"))
            sides.append(Side(system, where, spans))
            await sides[-1].begin()
        for side in sides:
            await side.turn(steps)
        began = time.perf_counter()
        before = size_of(directory)
        lasted = 0.0
        for pair in range(pairs):
            found = {}
            for side in sides if pair % 2 else sides[::-1]:
                found[side] = await side.turn(steps)
            lasted += found[sides[0]][1] * steps
            ratios.append(tuple(found[sides[0]][each] / found[sides[1]][each] for each in (0, 1)))  # type: ignore[arg-type]
        grown = size_of(directory) - before
    cpu, wall = (median(ratio[each] for ratio in ratios) for each in (0, 1))
    turn, span = microseconds(directory)
    rows = [
        ("CPU seconds of a step, with ÷ without", cpu),
        ("wall time of a step, with ÷ without", wall),
        ("µs per turn of a main lane", turn),
        ("µs per span", span),
        ("KB/s that all processes write", grown / 1e3 / lasted),
    ]
    figures = {"cpu_ratio": cpu, "wall_ratio": wall, "microseconds_per_turn": turn, "microseconds_per_span": span}
    figures |= {"kilobytes_per_second": rows[-1][1], "pairs": pairs, "seconds": time.perf_counter() - began}
    print_report(f"timelines: copy4, {pairs} pairs of {steps} steps", ("figure", "value"), rows, figures)


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob(f"*/{SPANS}/*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    answer_signals("bench")  # its event loops are timed, as a controller's are
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(arguments.pairs, arguments.steps, Path(directory)))


if __name__ == "__main__":
    main()
