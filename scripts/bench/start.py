"""How long a run over several hosts takes to start, against the same meshes on one host.

    sudo python scripts/bench/start.py [--hosts 8] [--times 3]

A start begins with the controller's program, and ends when every mesh has answered. A trainer, as many generators and
rollout workers as hosts, and a router are started on one host and over all, in turn; the table has the medians. The
hosts are network namespaces of this machine (`tests/hosts/namespaces.py`) whose workers wait, and engines are
simulated, so what takes the time is to start processes. Several hosts have an agent and a relay each more than one.

The last line is one JSON object: `start_ratio_8_hosts`, seconds over all hosts ÷ seconds on one, and of both the parts:
`*_placed`, until the hosts are attached and everything has its place, and `*_seconds`, until everything is up.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
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

from parts.table import print_report  # noqa: E402

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--drive", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        meshes, *workers = arguments.drive
        asyncio.run(drive(int(meshes), workers))
        os._exit(0)
    found = measured(arguments.hosts, arguments.times)
    figures = {f"start_ratio_{arguments.hosts}_hosts": found["hosts"]["up"] / found["one"]["up"]}
    figures |= {
        f"{way}_{name}": found[way][what] for way in found for name, what in (("placed", "placed"), ("seconds", "up"))
    }
    rows = [(way, parts["placed"], parts["up"]) for way, parts in found.items()]
    print_report(f"start of {2 * arguments.hosts + 2} meshes, seconds", ("hosts", "placed", "up"), rows, figures)


if __name__ == "__main__":
    main()
