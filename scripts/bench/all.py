"""Runs every benchmark briefly and says which figures fell since they were last recorded. Half an hour on two cores.

    python scripts/bench/all.py [NAME …] [--rounds 3]     against RECORD.json; NAME: a part of a program's name
    python scripts/bench/all.py --against ../old          against another checkout, both in turns; before an issue ends
    python scripts/bench/all.py --rounds 3 --record       writes RECORD.json and the tables of the README
    python scripts/bench/all.py --rounds 0 --record       only makes the tables anew, after a change of programs.toml
    scripts/acceptance.sh [NAME …]                        whole runs, all other jobs too, against what is asked for

A figure fell if its median is worse than the one before by more than the larger spread of the two. A spread is half of
the distance between best and worst round, and at least what `programs.toml` states. A program that fails and a figure
that is missing are findings too. Exit code: 1 if there is a finding.

What is recorded is of another moment, and perhaps of another machine: beside other work only `--against` tells a change
of the code. There the other checkout's own programs run, without options that they do not know. Ctrl-C ends the
measuring; what was measured until then is compared, and recorded if that was asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parts.programs import ROOT, RUNS, Measured, Program, Value, load_programs
from parts.table import print_table
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

HERE = Path(__file__).resolve().parent
PROGRAMS, RECORD, README = HERE / "programs.toml", HERE / "RECORD.json", HERE / "README.md"
MARKS = "<!-- {}: written by all.py --record -->", "<!-- end of {} -->"
NOW, OTHER = "now", "the other checkout"
USUAL_SECONDS = 120.0
"""Of a program whose time was never recorded; only the progress bar goes by it."""

Found = dict[tuple[str, str], Measured]
"""By checkout and program."""


def measure(
    programs: Sequence[Program],
    roots: Mapping[str, Path],
    directory: Path,
    *,
    rounds: int,
    brief: bool,
    expected: Mapping[str, float],
) -> Found:
    """Run everything; checkouts take turns, and change who is first. Ctrl-C or SIGTERM ends it."""
    found: Found = {}
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    turns = [
        (number, program, side)
        for number in range(rounds)
        for program in programs
        for side in (list(roots) if number % 2 else reversed(roots))
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=3600, transient=True) as progress:
        task = progress.add_task("", total=sum(expected.get(program.name, USUAL_SECONDS) for _, program, _ in turns))
        try:
            for number, program, side in turns:
                what = f"{program.name}, round {number + 1} of {rounds}" + (f", {side}" if len(roots) > 1 else "")
                progress.update(task, description=what)
                measured = found.setdefault((side, program.name), Measured())
                before = len(measured.problems)
                where = directory / re.sub(r"\W+", "-", f"{program.name}-{number}-{side}")
                measured.run(program, where, brief=brief, root=roots[side])
                said = [f"{measured.seconds[-1]:.0f} s", *measured.problems[before:]]
                progress.console.print(f"{what}: {', '.join(said)}", soft_wrap=True)
                progress.advance(task, expected.get(program.name, USUAL_SECONDS))
        except KeyboardInterrupt:
            progress.console.print("interrupted; this is what was measured:")
    return {key: measured for key, measured in found.items() if measured.seconds}


def rows_of(
    programs: Iterable[Program], found: Found, record: Mapping[str, Any], *, brief: bool
) -> tuple[list[list[str | float]], list[str]]:
    """Rows for people (figure, before, now, asked, verdict) and findings. Whole runs are held against what is asked,
    brief ones against the other checkout, or against the record if there is none."""
    rows: list[list[str | float]] = []
    findings: list[str] = []
    for program in programs:
        if (measured := found.get((NOW, program.name))) is None:
            continue
        findings += [f"{program.name}: {problem}" for problem in measured.problems]
        other, values = found.get((OTHER, program.name)), measured.values(program)
        past = other.values(program) if other is not None else recorded(record, program)
        for key, figure in program.figures.items():
            before, now = past.get(key), values.get(key)
            if now is None:
                said = "MISSING"
            elif not brief:
                said = "" if figure.passes(now.median) else "MISSED"
            else:
                said = figure.changed(before, now) if before is not None else "new"
            rows.append([f"{program.name}.{key}", str(before or "–"), str(now or "–"), figure.asked, said])
            if said.isupper():
                findings.append(f"{program.name}.{key}: {said.lower()}, {now or '–'}; before {before or '–'}")
    return rows, findings


# --- the record ------------------------------------------------------------------------------------------------------


def recorded(record: Mapping[str, Any], program: Program) -> dict[str, Value]:
    return {key: Value(*value) for key, value in record.get(program.name, {}).get("figures", {}).items()}


def commit() -> str:
    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def machine() -> str:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{model[1] if model else os.uname().machine}, {len(os.sched_getaffinity(0))} cores"


def entry_of(program: Program, measured: Measured) -> dict[str, Any]:
    """A program's part of the record."""
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "load_before": round(measured.load, 1),
        "rounds": len(measured.seconds),
        "seconds": round(statistics.median(measured.seconds)),
        "figures": {
            key: [float(f"{number:.4g}") for number in value] for key, value in measured.values(program).items()
        },
    }


def with_tables(text: str, record: Mapping[str, Any], programs: Sequence[Program]) -> str:
    """The README with its two tables made anew from the record."""
    benchmarks = [program for program in programs if program.brief is not None]
    tables = {
        "figures": ["| figure | recorded | asked | program |", "|---|---|---|---|"],
        "programs": ["| program | question | commit | rounds | load before | seconds |", "|---|---|---|---|---|---|"],
    }
    for program in benchmarks:
        past, entry = recorded(record, program), record.get(program.name, {})
        for key, figure in program.figures.items():
            value = past.get(key, "–")
            tables["figures"].append(f"| {figure.what} | {value} | {figure.asked} | `{program.name}.py` |")
        origin = [str(entry.get(word, "–")) for word in ("commit", "rounds", "load_before", "seconds")]
        tables["programs"].append(f"| `{program.name}.py` | {program.question} | {' | '.join(origin)} |")
    machines = sorted({entry["machine"] for entry in record.values()})
    tables["figures"] += ["", f"Recorded on {' and '.join(machines) or 'no machine yet'}."]
    for name, lines in tables.items():
        begin, end = (mark.format(name) for mark in MARKS)
        before, _, rest = text.partition(begin)
        text = "\n".join((before + begin, "", *lines, "", end + rest.partition(end)[2]))
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs whose name contains this; default: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--against", type=Path, help="another checkout, such as a worktree of an older commit")
    parser.add_argument("--record", action="store_true", help="write what was measured into RECORD.json and the README")
    parser.add_argument("--whole", action="store_true", help="not briefly, and what is no benchmark too: takes hours")
    parser.add_argument("--list", action="store_true", help="name the programs and stop")
    options = parser.parse_args()
    programs = load_programs(PROGRAMS)
    chosen = [each for each in programs if options.whole or each.brief is not None]
    chosen = [each for each in chosen if not options.names or any(name in each.name for name in options.names)]
    if options.list or not chosen:
        print("\n".join(program.name for program in chosen or programs))
        return 0 if chosen else 2
    if os.geteuid() and (left_out := [program.name for program in chosen if program.root]):
        print(f"left out, because only root may run them: {', '.join(left_out)}")
        chosen = [program for program in chosen if not program.root]
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    expected = {} if options.whole else {name: entry["seconds"] for name, entry in record.items()}
    directory = RUNS / time.strftime(f"{'acceptance' if options.whole else 'bench'}-%Y%m%d-%H%M%S-{os.getpid()}")
    roots = {OTHER: options.against.resolve(), NOW: ROOT} if options.against else {NOW: ROOT}
    found = measure(chosen, roots, directory, rounds=options.rounds, brief=not options.whole, expected=expected)
    rows, findings = rows_of(chosen, found, record, brief=not options.whole)
    title = f"{time.strftime('%Y-%m-%d')}, commit {commit()}, rounds: {options.rounds}, logs in {directory}"
    header = ["figure", str(options.against or "recorded"), "now", "asked", "verdict"]
    print_table(title, header, rows)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "table.txt").open("w") as file:
        print_table(title, header, rows, file=file)
    others = {entry["machine"] for name, entry in record.items() if (NOW, name) in found} - {machine()}
    if others and not options.against:
        print(f"what is recorded is of another machine: {' and '.join(sorted(others))}")
    for (side, name), measured in found.items():
        if side == OTHER and measured.problems:
            print(f"{name}, {side}: {'; '.join(measured.problems)}")
    if options.record:
        new = {each.name: entry_of(each, found[NOW, each.name]) for each in chosen if (NOW, each.name) in found}
        record |= {name: entry for name, entry in new.items() if entry["figures"]}
        known = {each.name: record[each.name] for each in programs if each.name in record}
        RECORD.write_text(json.dumps(known, indent=1) + "\n")
        README.write_text(with_tables(README.read_text(), known, programs))
    print("\n".join(findings) or ("nothing is missed" if options.whole else "nothing fell"))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
