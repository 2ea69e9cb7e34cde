#!/usr/bin/env python
"""What was run of each family of models, as the tables of `titan_rl/policy/README.md`.

    python scripts/model_matrix.py                  runs the tests of all cells (about 15 minutes on two cores)
    python scripts/model_matrix.py --learn          also trains a tiny policy of each family from three seeds
    python scripts/model_matrix.py --learn --write  and writes the tables into the manual

A cell is there when all of its tests passed. One that failed says so, and the program exits with 1. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HOME = Path(__file__).parents[1]
MANUAL = HOME / "titan_rl/policy/README.md"
MARKS = "<!-- models: begin -->", "<!-- models: end -->"
FAMILIES = {
    "Qwen3": ("tied", "untied", "wide heads"),
    "Llama 3": ("llama",),
    "Qwen3 MoE": ("moe",),
    "the manual's Qwen2": ("own",),
}
"""Of the policies that tests know by these names."""
SHAPES = {
    "tied": "Qwen3, tied head",
    "untied": "Qwen3, its own head, 3 layers",
    "wide heads": "Qwen3, heads of 128",
    "llama": "Llama 3",
}
ENOUGH = 0.95
SEEDS = (0, 1, 2)
LEARNERS = {
    "Qwen3": ["--recipe", "copy4"],
    "Llama 3": ["--recipe", "copy4", "--policy.tiny.architecture", "llama3", "--loop.steps", "250"],
    "Qwen3 MoE": ["--recipe", "copy4", "--policy.tiny.architecture", "qwen3_moe"],
    "Qwen3 MoE, no replay": [
        *("--recipe", "copy4", "--policy.tiny.architecture", "qwen3_moe", "--trainer.replay-routes", "false")
    ],
    "Qwen3, LoRA": ["--config", "rl_configs/copy4_lora.toml"],
}
BASE = ["--recipe", "copy4_quick", "--environment.kwargs.digits", "3", "--trainer.warmup.steps", "100"]
"""What LoRA begins with: it can copy three digits."""


class Cell(NamedTuple):
    claim: str
    family: str
    where: str


def layout(case: tuple[str, int, int]) -> Cell:
    policy, data, tensor = case
    return Cell("trainer", policy, f"{data}×{tensor}")


def swap(swap: tuple[str, str, str]) -> Cell:
    policy, dtype, _ = swap
    return Cell("new weights", policy, dtype)


def parity(shape: str, engine: str, dtype: str) -> Cell:
    return Cell(f"parity, {engine}", shape, dtype)


CLAIMS = {
    "trainer": "trainer, FSDP × TP ranks: loads the checkpoint bit for bit, gradients as one rank's, logprobs as "
    "transformers' (3e-6), what it saves reloads there bit for bit",
    "new weights": "an engine with new weights is a fresh one to the last bit; each fault in its memory is seen",
}
TESTS = {
    "tests/policy/test_updater_ranks.py": layout,
    "tests/generation/test_vllm_engine.py": swap,
    "tests/generation/test_parity.py": parity,
}
"""Tests of such parameters, and no others, are run."""


class Tried:
    """A plugin of pytest: whether all tests of a cell passed."""

    def __init__(self) -> None:
        self.cells: dict[Cell, bool] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if self._cell(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any) -> Any:
        report = yield
        cell = self._cell(item)
        assert cell is not None
        if report.failed or (report.when == "call" and report.passed):
            self.cells[cell] = self.cells.get(cell, True) and report.passed
        return report

    @staticmethod
    def _cell(item: Any) -> Cell | None:
        named = TESTS[item.path.relative_to(HOME).as_posix()]
        taken = named.__code__.co_varnames[: named.__code__.co_argcount]
        given = getattr(item, "callspec", None) and item.callspec.params
        if not given or not {*taken} <= {*given}:
            return None
        return named(**{name: given[name] for name in taken})


def train(*arguments: str) -> tuple[Path, float]:
    """A new directory with the run, and what it came to on held-out prompts."""
    directory = Path(tempfile.mkdtemp())
    command = [sys.executable, "-m", "titan_rl.train", *arguments, "--logging.directory", str(directory)]
    subprocess.run(command, cwd=HOME, stdout=subprocess.DEVNULL, check=True)
    (run,) = directory.iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return run, [line["evaluation/exact_match"] for line in lines if "evaluation/exact_match" in line][-1]


def learned() -> dict[str, list[float]]:
    """Exact match of each family, by seed."""
    found: dict[str, list[float]] = {name: [] for name in LEARNERS}
    for seed in map(str, SEEDS):
        base, _ = train(*BASE, "--loop.steps", "0", "--seed", seed)
        for name, arguments in LEARNERS.items():
            on = ["--policy.path", str(base / "checkpoint")] if "LoRA" in name else []
            found[name].append(train(*arguments, *on, "--seed", seed)[1])
            print(f"{name}, seed {seed}: {found[name][-1]:.3f}", flush=True)
    return found


def of_family(cells: Mapping[Cell, bool], claim: str, policies: Sequence[str]) -> str:
    found: dict[str, bool] = {}
    for cell, passed in cells.items():
        if cell.claim == claim and cell.family in policies:
            found[cell.where] = found.get(cell.where, True) and passed
    return ", ".join(where if passed else f"**{where} failed**" for where, passed in sorted(found.items())) or "–"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def tables(cells: Mapping[Cell, bool], runs: Mapping[str, Sequence[float]]) -> list[str]:
    lines = table(
        ["", *FAMILIES],
        [
            [text, *(of_family(cells, claim, policies) for policies in FAMILIES.values())]
            for claim, text in CLAIMS.items()
        ],
    )
    engines = list(dict.fromkeys(cell.claim for cell in cells if cell.claim.startswith("parity")))
    lines += ["", "`trainer.parity bitwise`: in every bit, by the engine's ranks and blocks:", ""]
    rows = [[text, *(of_family(cells, engine, [shape]) for engine in engines)] for shape, text in SHAPES.items()]
    lines += table(["", *(engine.removeprefix("parity, ") for engine in engines)], rows)
    if runs:
        lines += ["", "Held-out exact match of copy4, of a policy that began at random (LoRA: with three digits):", ""]
        values = [[name, *(f"{value:.3f}" for value in by_seed)] for name, by_seed in runs.items()]
        lines += table(["", *(f"seed {seed}" for seed in SEEDS)], values)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", action="store_true", help="train a policy of each family, too (about 15 minutes)")
    parser.add_argument("--write", action="store_true", help="write the tables into the manual")
    options = parser.parse_args()
    tried = Tried()
    code = pytest.main(
        ["-m", "", "-q", "--no-header", "--rootdir", str(HOME), *(str(HOME / each) for each in TESTS)], [tried]
    )
    runs = learned() if options.learn else {}
    lines = tables(tried.cells, runs)
    print("\n".join(lines))
    if options.write:
        before, _, rest = MANUAL.read_text().partition(MARKS[0])
        MANUAL.write_text("\n".join((before + MARKS[0], "", *lines, "", MARKS[1] + rest.partition(MARKS[1])[2])))
    least = min((value for values in runs.values() for value in values), default=None)
    failed = sum(not passed for passed in tried.cells.values())
    print(json.dumps({"cells": len(tried.cells), "failed_cells": failed, "least_exact_match": least}), flush=True)
    return int(code != 0 or failed > 0 or (least is not None and least < ENOUGH))


if __name__ == "__main__":
    sys.exit(main())
