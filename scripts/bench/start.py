"""How long a start takes, a replacement, and a start over several hosts.

    sudo python scripts/bench/start.py [--only quickstart kills hosts] [--hosts 8] [--times 3]

quickstart: the recipe of `scripts/quickstart.sh`, from its launch to its end, and a bare import of vLLM's engine beside
    it (`quickstart_to_imports`): what every process that samples took for itself before it could begin.
kills: a run of `copy4_async` with real engines loses a generator and its trainer to SIGKILL. `generator_back_seconds`
    is until the generator serves again, `trainer_back_seconds` until the next step is written.
hosts: a start begins with the controller's program, and ends when every mesh has answered. A trainer, as many
    generators and rollout workers as hosts, and a router are started on one host and over all, in turn. The hosts are
    network namespaces of this machine (`tests/hosts/namespaces.py`) whose workers wait, and engines are simulated, so
    what takes the time is to start processes. Several hosts have an agent and a relay each more than one. Needs root.
    `start_ratio_8_hosts`: seconds over all hosts ÷ seconds on one; `*_placed`, until everything has its place, and
    `*_seconds`, until everything is up.

Figures are medians over the times.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from parts.long_run import long_run  # noqa: E402
from parts.table import print_report, print_table  # noqa: E402
from parts.watched import watch  # noqa: E402

from titan_rl.config import RunConfig  # noqa: E402
from titan_rl.config_registry import copy4  # noqa: E402


def config_for(meshes: int, workers: Sequence[str]) -> RunConfig:
    recipe = copy4()
    return dataclasses.replace(
        recipe,
        generator=dataclasses.replace(recipe.generator, engine="simulated", count=meshes),
        rollout=dataclasses.replace(recipe.rollout, workers=meshes),
        placement=dataclasses.replace(recipe.placement, hosts=tuple(workers), trusted_network=True),
    )


async def drive(meshes: int, workers: Sequence[str]) -> None:
    """The controller: says when it has placed the meshes, and when they are up."""
    from titan_rl.run.start import start

    said: list[str] = []

    def on_mesh(mesh: str, doing: str) -> None:
        if not said:
            said.append("placed")
            print("placed", flush=True)

    with tempfile.TemporaryDirectory() as logs:
        async with start(config_for(meshes, workers), log_directory=Path(logs), on_mesh=on_mesh):
            print("up", flush=True)


def measured(count: int, times: int) -> dict[str, dict[str, float]]:
    """Median seconds until "placed" and until "up", on one host and over all."""
    from tests.hosts.namespaces import Hosts
    from tests.hosts.workers import workers
    from titan_rl.policy.models.tiny import model_directory

    model_directory(config_for(count, ()))  # it is made once for all
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with Hosts(count) as hosts, workers(hosts[1:]) as others:
        for turn in range(2 * times):
            way = "hosts" if turn % 2 else "one"
            command = [sys.executable, __file__, "--drive", str(count), *(others if turn % 2 else ())]
            began = time.monotonic()
            driver = hosts[0].run(command, env=environment, stdout=subprocess.PIPE, text=True)
            for line in driver.stdout:
                found[way][line.strip()].append(time.monotonic() - began)
            if driver.wait():
                sys.exit(f"the controller ended with {driver.returncode}")
    return {way: {what: median(seconds) for what, seconds in parts.items()} for way, parts in found.items()}


def quickstart(times: int) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Figures and rows."""
    recipe = re.findall(r"--recipe (\w+)", (ROOT / "scripts" / "quickstart.sh").read_text())[-1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    seconds: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(times):
            began = time.monotonic()
            subprocess.run([sys.executable, "-c", "from vllm import LLMEngine"], env=environment, check=True)
            imports = time.monotonic() - began
            (directory := Path(temporary) / str(number)).mkdir()
            command = [sys.executable, "-m", "titan_rl.train", "--recipe", recipe]
            run = watch([*command, "--logging.directory", str(directory)], directory, environment)
            seconds.append((run.wall, run.steps[0], imports))
    wall, first, imports = map(median, zip(*seconds, strict=True))
    figures = {"quickstart_seconds": wall, "quickstart_first_step_seconds": first, "import_seconds": imports}
    figures["quickstart_to_imports"] = median(wall / imports for wall, _, imports in seconds)
    return figures, [("the quick start", wall), ("its first step", first), ("import of vLLM's engine", imports)]


def kills(times: int) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Figures and rows."""
    found: dict[str, list[float]] = {"generator0": [], "trainer": []}
    with long_run({"loop.steps": 1_000_000}) as run:
        for _ in range(times):
            for mesh, seconds in found.items():
                step, said = run.step(), len(run.output())
                run.wait(lambda step=step: run.step() > step + 3)  # it goes its usual pace
                os.kill(run.processes()[mesh], signal.SIGKILL)
                lost = run.wait(lambda said=said, mesh=mesh: f"lost {mesh}: " in run.output()[said:])
                step = run.step()
                seconds.append(run.wait(lambda step=step: run.step() > step) + lost if mesh == "trainer" else lost)
                back = run.wait(lambda said=said, mesh=mesh: f"{mesh} is back after " in run.output()[said:])
                seconds[-1] += back if mesh != "trainer" else 0.0
    generator, trainer = map(median, found.values())
    figures = {"generator_back_seconds": generator, "trainer_back_seconds": trainer}
    return figures, [("a killed generator serves again", generator), ("training without its trainer", trainer)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["quickstart", "kills", "hosts"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--drive", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        meshes, *workers = arguments.drive
        asyncio.run(drive(int(meshes), workers))
        os._exit(0)
    figures: dict[str, float] = {}
    for part, measure in (("quickstart", quickstart), ("kills", kills)):
        if part in arguments.only:
            found_here, rows = measure(arguments.times)
            print_table(part, ("", "seconds"), rows)
            figures |= found_here
    if "hosts" not in arguments.only:
        return print(json.dumps(figures))
    found = measured(arguments.hosts, arguments.times)
    figures |= {f"start_ratio_{arguments.hosts}_hosts": found["hosts"]["up"] / found["one"]["up"]}
    figures |= {
        f"{way}_{name}": found[way][what] for way in found for name, what in (("placed", "placed"), ("seconds", "up"))
    }
    rows = [(way, parts["placed"], parts["up"]) for way, parts in found.items()]
    print_report(f"start of {2 * arguments.hosts + 2} meshes, seconds", ("hosts", "placed", "up"), rows, figures)


if __name__ == "__main__":
    main()
