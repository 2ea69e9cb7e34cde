"""What programs.toml says, and how one of its programs is run: it never raises for what a program does.

A program that fails, hangs or reports nothing is a problem of its `Measured`, next to what other rounds reported.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
RUNS = ROOT / "runs"
MOST_SECONDS = 5400.0
"""A program that takes longer is stopped with all its processes."""
PATIENCE_SECONDS = 30.0  # after Ctrl-C, until what is left of a program is killed


class Value(NamedTuple):
    """A figure over its rounds."""

    median: float
    spread: float
    """Half of the distance between best and worst round, or what is stated for the figure if that is more."""

    def __str__(self) -> str:
        digits = max(0, -math.floor(math.log10(self.spread or 1)))
        return f"{self.median:,.{digits}f} ± {self.spread:,.{digits}f}"


def shown(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that a program reports."""

    what: str = ""
    """For the README."""
    least: float | None = None
    """The smallest value that an acceptance list takes; more is better."""
    most: float | None = None
    """The largest one; less is better."""
    less: bool = False
    """Less is better, and none asks for a value."""
    floor: float = 0.1
    """Least spread as a share of the value: what brief runs repeat to on two shared cores."""
    grain: float = 0.0
    """Least spread in the figure's unit, for those that are near 0."""

    @property
    def asked(self) -> str:
        return (
            f"≥ {shown(self.least)}" if self.least is not None else "" if self.most is None else f"≤ {shown(self.most)}"
        )

    def passes(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def value(self, rounds: Sequence[float]) -> Value:
        median = statistics.median(rounds)
        return Value(median, max((max(rounds) - min(rounds)) / 2, self.floor * abs(median), self.grain))

    def changed(self, before: Value, now: Value) -> str:
        """FELL or better, where the medians are further apart than the larger spread; empty: neither."""
        worse = (now.median - before.median) * (1 if self.less or self.most is not None else -1)
        spread = max(before.spread, now.spread)
        return "FELL" if worse > spread else "better" if -worse > spread else ""


@dataclass(frozen=True, kw_only=True)
class Program:
    """`{python}`, `{directory}` (of this run of the program) and `{runs}` stand for themselves in its arguments."""

    name: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """By their names in what it reports. What it reports besides is not compared."""
    question: str = ""
    """That it answers, for the README."""
    brief: str | None = None
    """Arguments of a brief run. None: it has none, and is no benchmark."""
    command: str = "{python} scripts/bench/{name}.py"
    reads: str = "last line"
    """Where its figures are: a JSON object in the `last line`, the summary of the one `run` below its directory, or the
    counts of `pytest`."""
    root: bool = False
    """Only root may run it, because it makes network namespaces."""


def load_programs(path: Path) -> list[Program]:
    programs = []
    for name, settings in tomllib.loads(path.read_text()).items():
        figures = {key: Figure(**figure) for key, figure in settings.pop("figures", {}).items()}
        programs.append(Program(name=name, figures=figures, **settings))
    return programs


@dataclass
class Measured:
    """What one program came to in one checkout, over its rounds."""

    reported: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    load: float = 0.0
    """The highest load average before a round."""

    def values(self, program: Program) -> dict[str, Value]:
        """Of the program's figures, those that were reported."""
        reported = self.reported
        return {key: figure.value(reported[key]) for key, figure in program.figures.items() if key in reported}

    def run(self, program: Program, directory: Path, *, brief: bool, root: Path = ROOT) -> None:
        """One more round, in this checkout, whose environment is taken if it has one."""
        directory.mkdir(parents=True)
        own = root / ".venv" / "bin" / "python"
        python = own if root != ROOT and own.exists() else sys.executable
        places = {"python": python, "name": program.name, "directory": directory, "runs": RUNS}
        command = shlex.split(program.command.format(**places))
        if brief and program.brief:
            command += _known(shlex.split(program.brief.format(**places)), command, directory, root)
        self.load = max(self.load, os.getloadavg()[0])
        began = time.monotonic()
        code, output = run_command(command, directory / "output.log", root)
        self.seconds.append(time.monotonic() - began)
        ended = "" if code == 0 else "took too long" if code is None else f"exit {code}"
        try:
            for key, number in flatten(READERS[program.reads](directory, output)).items():
                if isinstance(number, (int, float)) and math.isfinite(number):
                    self.reported.setdefault(key, []).append(float(number))
        except NoFigures as error:
            ended = ended or str(error)
        if ended:
            self.problems.append(f"{ended}, {directory}/output.log")


def _known(words: list[str], command: Sequence[str], directory: Path, root: Path) -> list[str]:
    """The arguments without the options that another checkout's program does not know."""
    if root == ROOT:
        return words
    options = re.findall(r"--[\w-]+", run_command([*command, "--help"], directory / "help.log", root)[1])
    kept, keep = [], True
    for word in words:
        keep = word in options if word.startswith("--") else keep
        kept += [word] if keep else []
    return kept


def run_command(command: Sequence[str], log: Path, root: Path = ROOT) -> tuple[int | None, str]:
    """Exit code (None: it took too long) and the output, which is also in `log`. All its processes are gone after."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SECONDS)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace")


# --- what a program reports ------------------------------------------------------------------------------------------


class NoFigures(Exception):
    """A program reported none; says why."""


def last_line_json(directory: Path, output: str) -> dict[str, Any]:
    """The JSON object on the last line of a program's output."""
    lines = output.strip().splitlines()
    try:
        figures = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise NoFigures("the last line of the output is not JSON") from error
    if not isinstance(figures, dict):
        raise NoFigures("the last line of the output is not a JSON object")
    return figures


def run_summary(directory: Path, output: str) -> dict[str, Any]:
    """What the one run below `directory` wrote about itself."""
    summaries = list(directory.glob("*/summary.json"))
    if len(summaries) != 1:
        raise NoFigures(f"{len(summaries)} runs with a summary.json, not one")
    return json.loads(summaries[0].read_text())


def test_counts(directory: Path, output: str) -> dict[str, Any]:
    """The numbers in pytest's last line: passed, failed, skipped …"""
    summary = re.findall(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed)", output[-2000:])
    if not summary:
        raise NoFigures("no summary of pytest in the output")
    return {"failed": 0, "skipped": 0} | {what: int(count) for count, what in summary}


READERS: Mapping[str, Callable[[Path, str], dict[str, Any]]] = {
    "last line": last_line_json,
    "run": run_summary,
    "pytest": test_counts,
}


def flatten(figures: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in figures.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
