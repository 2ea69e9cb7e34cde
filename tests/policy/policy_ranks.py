"""Runs scenarios on several trainer ranks in a few processes that are started once.

The parent calls `run_scenarios`; one process runs this file and forks the ranks. A scenario is a function of a module
beside it that returns something that pickles; every process joins a fresh torch.distributed world per scenario, unless
the one before kept its own.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from titan_rl.processes import RENDEZVOUS

TIME_LIMIT = 900
"""Seconds; only ever reached by ranks that hang. A busy machine takes several times what a free one does."""


@dataclass
class Scenario:
    name: str
    """Function of `module`."""
    ranks: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: str = "policy_scenarios"
    keep_world: bool = False
    """The next scenario goes on in this one's torch.distributed world, if it has as many ranks. Scenarios that make
    many models need it: DTensor keeps equal meshes of an earlier world, whose groups are gone."""


def run_scenarios(scenarios: list[Scenario], directory: Path) -> list[list[Any]]:
    """Results by scenario and rank."""
    plan = directory / "plan.pkl"
    plan.write_bytes(pickle.dumps([vars(scenario) for scenario in scenarios]))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
    }
    ranks = max(scenario.ranks for scenario in scenarios)
    command = [sys.executable, __file__, str(ranks), str(plan)]
    with subprocess.Popen(command, env=environment, start_new_session=True) as processes:
        try:
            code = processes.wait(TIME_LIMIT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(processes.pid, signal.SIGKILL)
    said = [
        f"--- rank {rank}\n{log.read_text()[-4000:]}" for rank in range(ranks) if (log := _log(plan, rank)).exists()
    ]
    assert code == 0, "\n".join(said)
    return [
        [pickle.loads((directory / f"{number}.{rank}.pkl").read_bytes()) for rank in range(scenario.ranks)]
        for number, scenario in enumerate(scenarios)
    ]


def _log(plan: Path, rank: int) -> Path:
    return plan.with_name(f"rank{rank}.log")


def cells(matrix: Collection[Any], ci: Collection[Any]) -> list[Any]:
    """Parameters of a test, in their order; those that CI does not run belong to the acceptance list."""
    return [pytest.param(cell, marks=() if cell in ci else pytest.mark.acceptance) for cell in matrix]


class Results(dict[Any, list[Any]]):
    """What each rank of a scenario returned, by its name. The ranks start once for all scenarios of CI, when the first
    one is looked up, and once more for the others."""

    def __init__(self, scenarios: Mapping[Any, Scenario], ci: Collection[Any], directory: Path) -> None:
        self._rest = [
            {name: scenario for name, scenario in scenarios.items() if (name in ci) is in_ci} for in_ci in (True, False)
        ]
        self._directory = directory

    def __missing__(self, name: Any) -> list[Any]:
        directory = self._directory / f"start {len(self._rest)}"
        directory.mkdir()
        scenarios = self._rest.pop(0)
        self.update(zip(scenarios, run_scenarios(list(scenarios.values()), directory), strict=True))
        return self[name]


def main(ranks: int, plan: Path) -> int:
    """Fork the ranks, after the imports, which take each of them longer than most scenarios. If one fails, the others
    would wait for it in a collective."""
    import torch

    torch.set_num_threads(1)
    plans = pickle.loads(plan.read_bytes())
    for scenario in plans:
        importlib.import_module(scenario["module"])
    for rank in range(ranks):
        if os.fork() == 0:
            log = os.open(_log(plan, rank), os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            run(rank, plans, plan)
            return 0
    return int(any(os.wait()[1] for _ in range(ranks)))  # as soon as one fails


def run(rank: int, plans: list[dict[str, Any]], plan: Path) -> None:
    import torch.distributed as dist

    for number, (scenario, following) in enumerate(zip(plans, [*plans[1:], None], strict=True)):
        if rank >= scenario["ranks"]:
            continue
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(scenario["ranks"])}
        os.environ[RENDEZVOUS] = str(plan.with_name(f"{number}.rendezvous"))
        result = getattr(importlib.import_module(scenario["module"]), scenario["name"])(**scenario["kwargs"])
        plan.with_name(f"{number}.{rank}.pkl").write_bytes(pickle.dumps(result))
        goes_on = scenario["keep_world"] and following is not None and following["ranks"] == scenario["ranks"]
        if dist.is_initialized() and not goes_on:
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
