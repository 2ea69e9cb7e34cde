"""Runs scenarios on several ranks of torch.distributed, forked from one process that has imported what they need.

That process runs this file, and lives as long as pytest: the imports take longer than most scenarios. `run_scenarios`
tells it what to do. A scenario is a function that returns something that pickles, and joins the world of its ranks.
Neighbours with as many ranks share a world: DTensor keeps equal meshes of an earlier one, whose groups are gone.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from titan_rl.processes import RENDEZVOUS

TIME_LIMIT = 900
"""Seconds; only ever reached by ranks that hang. A busy machine takes several times what a free one does."""


@dataclass
class Scenario:
    function: Callable[..., Any]
    ranks: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    killed: tuple[int, ...] = ()
    """Ranks that kill themselves in it, and return nothing. It must be the last one."""


class Imports(NamedTuple):
    """What a process has that forks ranks. It imports the modules of scenarios by itself, when it gets the first."""

    modules: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


ONLY_THEIRS = Imports()


class Forker:
    """The process that forks ranks."""

    def __init__(self, imports: Imports) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= dict(imports.variables)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, "-m", __spec__.name, *imports.modules]
        self._process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
        atexit.register(self.kill)

    def run(self, ranks: int, plan: Path) -> str:
        """What the ranks came to: "0" is well."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(ranks, plan, file=self._process.stdin, flush=True)
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._process.stdout, select.POLLIN)
        answered = poll.poll(1000 * TIME_LIMIT)
        return self._process.stdout.readline().strip() if answered else f"no answer within {TIME_LIMIT} s"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


forkers: dict[Imports, Forker] = {}


def run_scenarios(scenarios: list[Scenario], directory: Path, imports: Imports = ONLY_THEIRS) -> list[list[Any]]:
    """Results by scenario and rank."""
    plan = directory / "plan.pkl"
    plan.write_bytes(pickle.dumps(scenarios))
    ranks = max(scenario.ranks for scenario in scenarios)
    forker = forkers.get(imports) or forkers.setdefault(imports, Forker(imports))
    if (code := forker.run(ranks, plan)) != "0":
        forkers.pop(imports).kill()
    logs = [
        f"--- rank {rank}\n{log.read_text()[-4000:]}" for rank in range(ranks) if (log := _log(plan, rank)).exists()
    ]
    assert code == "0", "\n".join([code, *logs])
    return [
        [
            None if rank in scenario.killed else pickle.loads((directory / f"{number}.{rank}.pkl").read_bytes())
            for rank in range(scenario.ranks)
        ]
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
        by_ranks = dict(sorted(scenarios.items(), key=lambda entry: entry[1].ranks))
        self._rest = [
            {name: scenario for name, scenario in by_ranks.items() if (name in ci) is in_ci} for in_ci in (True, False)
        ]
        self._directory = directory

    def __missing__(self, name: Any) -> list[Any]:
        directory = self._directory / f"start {len(self._rest)}"
        directory.mkdir()
        scenarios = self._rest.pop(0)
        self.update(zip(scenarios, run_scenarios(list(scenarios.values()), directory), strict=True))
        return self[name]


def main() -> None:
    """One plan for each line of the input."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays shared
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        ranks, plan = line.split(maxsplit=1)
        print(fork(int(ranks), Path(plan.strip())), file=answers, flush=True)


def fork(ranks: int, plan: Path) -> int:
    """Fork the ranks; 1: one failed, for which the others would wait in a collective."""
    scenarios = pickle.loads(plan.read_bytes())  # imports their modules
    for rank in range(ranks):
        if os.fork() == 0:
            log = os.open(_log(plan, rank), os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                run(rank, scenarios, plan)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    to_be_killed = len(scenarios[-1].killed)
    for _ in range(ranks):
        status = os.wait()[1]
        if status == signal.SIGKILL and to_be_killed:
            to_be_killed -= 1
        elif status:
            return 1
    return 0


def run(rank: int, scenarios: list[Scenario], plan: Path) -> None:
    import torch.distributed as dist

    before = 0
    for number, scenario in enumerate(scenarios):
        if scenario.ranks != before and dist.is_initialized():
            dist.destroy_process_group()
        before = scenario.ranks
        if rank >= scenario.ranks:
            continue
        if not dist.is_initialized():
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(scenario.ranks)}
            os.environ[RENDEZVOUS] = str(plan.with_name(f"{number}.rendezvous"))
        result = scenario.function(**scenario.kwargs)
        plan.with_name(f"{number}.{rank}.pkl").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
