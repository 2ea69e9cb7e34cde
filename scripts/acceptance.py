"""Runs the jobs of the acceptance lists one after the other and prints one table of their figures.

Every job is a program that a user could start by hand; nothing here measures anything itself. A job that fails,
hangs or prints no figures is a failed row, never a missing one. A capability adds its lines to `JOBS`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JOB_SECONDS = 5400.0
"""A job that takes longer is stopped with all its processes and fails."""


@dataclass(frozen=True)
class Job:
    """One program, where its figures come from, and which of them are asked for."""

    name: str
    command: Callable[[Path], list[str]]
    """Takes the job's own directory, returns the command; it runs in the root of the clone."""
    figures: Callable[[Path, str], dict[str, Any]]
    """Takes the job's own directory and its output, returns its figures; raises AcceptanceError."""
    at_least: Mapping[str, float] = field(default_factory=dict)
    """Figure → the smallest value that passes."""
    at_most: Mapping[str, float] = field(default_factory=dict)
    """Figure → the largest value that passes."""


NOTHING: Mapping[str, float] = {}


class AcceptanceError(Exception):
    """A job gave no figures; says why."""


@dataclass(frozen=True)
class Row:
    job: str
    figure: str
    value: str
    asked: str
    passed: bool


def last_line_json(directory: Path, output: str) -> dict[str, Any]:
    """The JSON object on the last line of a program's output."""
    lines = output.strip().splitlines()
    try:
        figures = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise AcceptanceError("the last line of the output is not JSON") from error
    if not isinstance(figures, dict):
        raise AcceptanceError("the last line of the output is not a JSON object")
    return figures


def run_summary(directory: Path, output: str) -> dict[str, Any]:
    """What the one run below `directory` wrote about itself."""
    summaries = list(directory.glob("*/summary.json"))
    if len(summaries) != 1:
        raise AcceptanceError(f"{len(summaries)} runs with a summary.json, not one")
    return json.loads(summaries[0].read_text())


def test_counts(directory: Path, output: str) -> dict[str, Any]:
    """The numbers in pytest's last line: passed, failed, skipped …"""
    summary = re.findall(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed)", output[-2000:])
    if not summary:
        raise AcceptanceError("no summary of pytest in the output")
    return {"failed": 0, "skipped": 0} | {what: int(count) for count, what in summary}


def quickstart(seed: int, exact_match: float) -> Job:
    """The recipe of the quick start with another seed, judged at its last step."""

    def command(directory: Path) -> list[str]:
        return ["scripts/quickstart.sh", "--seed", str(seed), "--logging.directory", str(directory)]

    return Job(f"quickstart, seed {seed}", command, run_summary, {"exact_match_after": exact_match})


def learns(recipe: str, *settings: str, exact_match: float) -> Job:
    """A recipe under other settings, judged at its last step."""

    def command(directory: Path) -> list[str]:
        return [
            ".venv/bin/python",
            "-m",
            "titan_rl.train",
            "--recipe",
            recipe,
            *settings,
            "--logging.directory",
            str(directory),
        ]

    return Job(" ".join((recipe, *settings)), command, run_summary, {"exact_match_after": exact_match})


def bench(name: str, at_most: Mapping[str, float] = NOTHING, **at_least: float) -> Job:
    """A program of scripts/bench/."""
    return Job(
        f"bench {name}",
        lambda directory: [sys.executable, f"scripts/bench/{name}.py"],
        last_line_json,
        at_least,
        at_most,
    )


JOBS = (
    quickstart(seed=0, exact_match=0.95),
    quickstart(seed=1, exact_match=0.95),
    quickstart(seed=2, exact_match=0.95),
    learns("copy4", "--router.weight-sync", "hot_swap", exact_match=0.95),
    learns("copy4_2x2", "--router.weight-sync", "drain", exact_match=0.95),
    learns("copy4_2x2", "--router.weight-sync", "hot_swap", exact_match=0.95),
    Job(
        "all tests and checks",
        lambda directory: ["scripts/test.sh", "-m", "", "-rs"],
        test_counts,
        {"passed": 3000},
        {"failed": 0, "skipped": 4},  # Slurm, which has a job of its own, and what no index or browser is there for
    ),
    bench("generation", ratio_to_bare_engine=0.92, ratio_to_bare_engine_short=0.85),
    bench(
        "router",
        at_most={"requests_to_the_dead": 0, "seconds_until_a_spare_serves": 6.0},
        throughput_ratio_64=0.7,
        ratio_to_three_quarters_while_dead=0.95,
        ratio_to_before_once_replaced=0.95,
    ),
    bench("weight_sync", at_most={"ratio_to_memcpy": 3.0, "ratio_total": 6.0}),
    bench("fanout", at_most={"trainer_egress_copies": 1.1, "time_ratio_to_link_bound": 1.3}),
    bench("start", at_most={"start_ratio_8_hosts": 1.3}),
    learns("copy4", exact_match=0.95),
    bench("data_plane", at_most={"controller_bytes_per_sample": 1023.9}),
    learns("copy4_async", exact_match=0.95),
    learns("sort5", exact_match=0.95),
    learns("tool_sum", exact_match=0.90),
    learns("tool_sum", "--seed", "1", exact_match=0.90),
    learns("tool_sum", "--seed", "2", exact_match=0.90),
    learns("tool_sum_openai", exact_match=0.90),
    bench(
        "async_speedup",
        at_most={"ratio_to_planner_most": 1.1, "share_of_bound_most": 1.0},
        ratio_to_planner_least=0.9,
        speedup_vs_sync=1.5,
        deterministic_to_drain=0.9,
    ),
    bench("gateway", ratio_to_router=0.8, ratio_to_api_server=1.3),
    bench("checkpoint", at_most={"begin_to_memcpy": 4.0, "committed_to_write": 2.0}),
    bench("soak", at_most={"controller_bytes_per_group": 300, "router_bytes_per_group": 300}),
    bench("deterministic", deterministic_to_plain_float32_64x128=0.85),
    bench(
        "trl",
        at_most={
            "step_ratio_to_trl": 0.8,
            "first_step_ratio_to_trl": 1.5,
            "learned_ratio_to_trl": 1.0,
            "wall_ratio_to_trl": 1.0,
            "cpu_ratio_to_trl": 1.5,
            "memory_ratio_to_trl": 3.0,
        },
        tokens_ratio_to_trl_64=1.0,
    ),
    Job(
        "chaos, 20 minutes",
        lambda _: [sys.executable, "scripts/chaos.py", "--seed", "0", "--minutes", "20", "--deterministic"],
        last_line_json,
        {"training_time_ratio": 0.9, "bitwise_equal": 1, "kinds": 30},
        {"lost": 0, "worst_detection_s": 2.0, "worst_hang_detection_s": 8.0, "worst_host_detection_s": 6.0},
    ),
    Job(
        "jobs on a real Slurm",  # apt-get install slurm-wlm munge
        lambda _: [".venv/bin/python", "-m", "pytest", "-m", "", "-rs", "tests/hosts/test_slurm.py"],
        test_counts,
        {"passed": 3},
        {"skipped": 0},
    ),
    Job("gpu_check, on the CPU", lambda _: [sys.executable, "scripts/gpu_check.py", "--device", "cpu"], last_line_json),
)


def run_command(command: list[str], log: Path) -> tuple[int | None, str]:
    """Exit code (None: it took too long) and the output, which is also in `log`. All its processes are gone after."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(JOB_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        except BaseException:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
    return code, log.read_text(errors="replace")


def flatten(figures: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in figures.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def judge(job: Job, directory: Path) -> list[Row]:
    """Run one job. Its first row is about the program itself, the others are its figures."""
    directory.mkdir(parents=True)
    started = time.monotonic()
    code, output = run_command(job.command(directory), directory / "output.log")
    spent = f"{time.monotonic() - started:.0f} s"
    ended = "took too long" if code is None else f"exit {code}"
    rows = [Row(job.name, "the program", f"{ended}, {spent}", "exit 0", code == 0)]
    try:
        figures = flatten(job.figures(directory, output))
    except AcceptanceError as error:
        return [*rows, Row(job.name, "figures", str(error), "figures", False)]
    for name, value in figures.items():
        least, most = job.at_least.get(name), job.at_most.get(name)
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        # Written so that a NaN, which compares false, fails; so does a word where a number is asked for.
        number = value if isinstance(value, (int, float)) else float("nan")
        passed = (least is None or number >= least) and (most is None or number <= most)
        rows.append(Row(job.name, name, shown, _asked(job, name), passed))
    for name in (job.at_least.keys() | job.at_most.keys()) - figures.keys():
        rows.append(Row(job.name, name, "not reported", _asked(job, name), False))
    return rows


def _asked(job: Job, figure: str) -> str:
    bounds = ((">=", job.at_least), ("<=", job.at_most))
    return ", ".join(f"{sign} {bound[figure]}" for sign, bound in bounds if figure in bound)


def table(rows: list[Row]) -> str:
    header = ("job", "figure", "value", "asked", "verdict")
    lines = [(row.job, row.figure, row.value, row.asked, "ok" if row.passed else "MISSED") for row in rows]
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    ruler = tuple("-" * width for width in widths)
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    heading = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, ruler)
    ]
    return "\n".join([*heading, *shown])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/acceptance.sh", description="Run what the acceptance lists ask for.")
    parser.add_argument("--list", action="store_true", help="name the jobs and stop")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the jobs whose name contains this")
    options = parser.parse_args()
    jobs = [job for job in JOBS if options.only in job.name]
    if options.list or not jobs:
        print("\n".join(job.name for job in JOBS))
        return 0 if options.list else 2
    directory = ROOT / "runs" / time.strftime("acceptance-%Y%m%d-%H%M%S")
    rows: list[Row] = []
    for job in jobs:
        print(f"{job.name} …", flush=True)
        rows += judge(job, directory / re.sub(r"\W+", "-", job.name))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    when = f"{time.strftime('%Y-%m-%d')}, commit {commit or 'unknown'}"
    (directory / "table.txt").write_text(f"{when}\n\n{table(rows)}\n")
    print(f"\n{when}\n{table(rows)}\n\nlogs and run directories: {directory}")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
