"""Runs all tests and judges them: what needs a second try, or is skipped for a reason that nobody listed, fails.

Two processes share the tests, because a test alone keeps a third of two cores idle; the longest files come first
(tests/slow_files.txt), so that none of them runs alone at the end. A test that fails is run once more, by itself. If it
passes then, it depends on load, order or luck: a bug, unless tests/known_flakes.txt has it with a date.

Exit codes: 0 all is well; 1 tests failed twice; 3 a second try was needed; 4 a skip is not in tests/allowed_skips.txt.
.ci/results/ keeps the reports of both tries as JUnit XML, and slow_files.txt as this run would write it.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".ci" / "results"
FLAKES = ROOT / "tests" / "known_flakes.txt"
SKIPS = ROOT / "tests" / "allowed_skips.txt"
FLAKE_DAYS = 30
"""A known flake that is not mended for so long fails again."""
SLOW_SECONDS = 15.0
"""Files that take longer are named in slow_files.txt."""
IN_TWO = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "30")


@dataclass(slots=True)
class Report:
    """What one try came to."""

    failed: set[str] = field(default_factory=set)
    """Tests, as pytest names them."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Test → the reason."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By file."""


def read(report: Path) -> Report:
    """A JUnit report of pytest's family xunit1, which names files."""
    found = Report()
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("file", "")
        test = f"{file}::{case.get('name', '')}" if file else case.get("name", "")
        found.seconds[file] += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            found.failed.add(test)
        if (skipped := case.find("skipped")) is not None:
            found.skipped[test] = skipped.get("message", "")
    return found


def entries(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(first word, the rest) of each line that is no comment."""
    words = (line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#"))
    return [(first, rest[0].strip() if rest else "") for first, *rest in words]


def unexplained(skipped: dict[str, str], allowed: Sequence[tuple[str, str]]) -> list[str]:
    """Skips of which no line says the file and the reason."""
    return [
        f"{test}: {reason}"
        for test, reason in skipped.items()
        if not any(fnmatchcase(test.partition("::")[0], file) and text in reason for file, text in allowed)
    ]


def unknown_flakes(passed_later: Iterable[str], known: Sequence[tuple[str, str]], today: date) -> list[str]:
    """Tests that needed a second try, and are not known since less than FLAKE_DAYS."""
    fresh = {
        rest.split()[0] for day, rest in known if date.fromisoformat(day) > today - timedelta(days=FLAKE_DAYS) and rest
    }
    return sorted(set(passed_later) - fresh)


def pytest(name: str, *arguments: str) -> tuple[int, Report]:
    """Exit code and report of one try, which is kept under this name."""
    report = RESULTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-rs", "-o", "junit_family=xunit1", f"--junitxml={report}", *arguments]
    code = subprocess.run(command, cwd=ROOT).returncode
    return code, read(report) if report.exists() else Report()


def main() -> int:
    RESULTS.mkdir(exist_ok=True, parents=True)
    (ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed").unlink(missing_ok=True)  # of an earlier run
    code, first = pytest("first", *IN_TWO, *sys.argv[1:])
    slow = sorted(((seconds, file) for file, seconds in first.seconds.items() if seconds > SLOW_SECONDS), reverse=True)
    (RESULTS / "slow_files.txt").write_text("".join(f"{file} {seconds:.0f}\n" for seconds, file in slow))
    if code == 1 and first.failed:
        print(f"== once more, by themselves: {', '.join(sorted(first.failed))}", flush=True)
        code, second = pytest("second", "--last-failed", "--last-failed-no-failures", "none")
        flakes = unknown_flakes(first.failed - second.failed, entries(FLAKES.read_text().splitlines()), date.today())
        for test in flakes:
            print(f"== needed a second try: {test}")
        code = code or (3 if flakes else 0)
    for skip in (skips := unexplained(first.skipped, entries(SKIPS.read_text().splitlines()))):
        print(f"== skipped for a reason that is not in {SKIPS.name}: {' '.join(skip.split())}")
    return code or (4 if skips else 0)


if __name__ == "__main__":
    sys.exit(main())
