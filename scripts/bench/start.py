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
    `start_ratio_8_hosts`: seconds over all hosts ÷ seconds on one.

Figures are medians over the times.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from parts.long_run import long_run  # noqa: E402
from parts.table import print_report  # noqa: E402
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
    """The controller: says when everything is up."""
    from titan_rl.run.start import start

    with tempfile.TemporaryDirectory() as logs:
        async with start(config_for(meshes, workers), log_directory=Path(logs)):
            print("up", flush=True)


def over_hosts(count: int, times: int) -> dict[str, float]:
    """Figures."""
    from tests.hosts.namespaces import Hosts
    from tests.hosts.workers import workers
    from titan_rl.policy.models.tiny import model_directory

    model_directory(config_for(count, ()))  # it is made once for all
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    seconds: tuple[list[float], list[float]] = ([], [])  # on one host and over all
    with Hosts(count) as hosts, workers(hosts[1:]) as others:
        for turn in range(2 * times):
            command = [sys.executable, __file__, "--drive", str(count), *(others if turn % 2 else ())]
            began = time.monotonic()
            driver = hosts[0].run(command, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in driver.stdout:  # one line
                seconds[turn % 2].append(time.monotonic() - began)
            if driver.wait():
                sys.exit(f"the controller ended with {driver.returncode}")
    one, over_all = map(median, seconds)
    return {f"start_ratio_{count}_hosts": over_all / one, "start_seconds_one_host": one, "start_seconds": over_all}


def quickstart(times: int) -> dict[str, float]:
    """Figures."""
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
    return figures


def kills(times: int) -> dict[str, float]:
    """Figures."""
    found: dict[str, list[float]] = {"generator": [], "trainer": []}
    with long_run({"loop.steps": 1_000_000}) as run:

        def kill(mesh: str) -> tuple[float, Callable[[str], bool]]:
            """Seconds until the run knows of it, and whether it has said something since."""
            step = run.step()
            run.wait(lambda: run.step() > step + 3)  # it goes its usual pace
            before = len(run.output())
            os.kill(run.processes()[mesh], signal.SIGKILL)
            return run.wait(
                lambda: f"lost {mesh}: " in run.output()[before:]
            ), lambda text: text in run.output()[before:]

        for _ in range(times):
            seconds, said = kill("generator0")
            found["generator"].append(seconds + run.wait(lambda said=said: said("generator0 is back after ")))
            (seconds, said), step = kill("trainer"), run.step()
            found["trainer"].append(seconds + run.wait(lambda step=step: run.step() > step))
            run.wait(lambda said=said: said("trainer is back after "))
    return {f"{name}_back_seconds": median(seconds) for name, seconds in found.items()}


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
    if "quickstart" in arguments.only:
        figures |= quickstart(arguments.times)
    if "kills" in arguments.only:
        figures |= kills(arguments.times)
    if "hosts" in arguments.only:
        figures |= over_hosts(arguments.hosts, arguments.times)
    print_report("start", ("", "measured"), list(figures.items()), figures)


if __name__ == "__main__":
    main()
