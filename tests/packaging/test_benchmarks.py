"""scripts/bench/all.py: what fell, fails, hangs or says nothing is a finding, and what it writes can be read (5 s)."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.append(str(BENCH))

from parts import programs as parts  # noqa: E402
from parts.programs import Figure, Measured, Program, load_programs  # noqa: E402

spec = spec_from_file_location("bench_all", BENCH / "all.py")
bench = module_from_spec(spec)
spec.loader.exec_module(bench)

PROGRAMS = load_programs(BENCH / "programs.toml")


def test_every_benchmark_is_listed_and_takes_the_options_of_its_brief_run() -> None:
    listed = [program for program in PROGRAMS if program.brief is not None]
    assert {program.name for program in listed} == {path.stem for path in BENCH.glob("*.py")} - {"all"}
    for program in listed:
        text = (BENCH / f"{program.name}.py").read_text()
        unknown = [option for option in re.findall(r"--[\w-]+", program.brief) if f'"{option}"' not in text]
        assert program.question and program.figures and not unknown, f"{program.name} {unknown}"
        assert all(figure.what for figure in program.figures.values())


def test_the_tables_of_the_readme_are_those_of_the_record() -> None:
    text = (BENCH / "README.md").read_text()
    assert bench.with_tables(text, json.loads((BENCH / "RECORD.json").read_text()), PROGRAMS) == text, (
        "all.py --rounds 0 --record"
    )


numbers = st.floats(0.01, 1e6)


@given(before=numbers, rounds=st.lists(numbers, min_size=1, max_size=5), floor=st.floats(0, 1), less=st.booleans())
def test_a_figure_fell_where_its_median_is_worse_by_more_than_the_larger_spread(before, rounds, floor, less) -> None:
    figure = Figure(floor=floor, less=less)
    past, now = figure.value([before]), figure.value(rounds)
    assert now.spread >= floor * now.median and now.spread >= (max(rounds) - min(rounds)) / 2
    worse = now.median - before if less else before - now.median
    spread = max(past.spread, now.spread)
    assert figure.changed(past, now) == ("FELL" if worse > spread else "better" if -worse > spread else "")
    assert figure.changed(now, now) == ""


def program(text: str, brief: str = "", **figures: Figure) -> Program:
    (code := text.replace("{", "{{").replace("}", "}}"))
    return Program(name="probe", brief=brief, figures=figures, command=f"{{python}} -c {json.dumps(code)}")


def run(probe: Program, directory: Path, before: dict[str, float] | None = None, *, brief: bool = True):
    """Figure → verdict, and the findings."""
    measured = Measured()
    measured.run(probe, directory / "probe", brief=brief)
    record = {"probe": {"figures": {key: [value, 0.1] for key, value in (before or {}).items()}}}
    rows, findings = bench.rows_of([probe], {(bench.NOW, "probe"): measured}, record, brief=brief)
    return {row[0].partition(".")[2]: row[-1] for row in rows}, findings


SAYS = "import json, sys; print('a table'); print(json.dumps({'a': 1.0, 'b': 2.0, 'c': {'d': 3}, 'e': float('nan')}))"


def test_brief_runs_are_held_against_the_record_and_what_fell_or_is_missing_is_a_finding(tmp_path: Path) -> None:
    figures = {name: Figure(floor=0) for name in ("a", "b", "c.d", "e", "f")}
    verdicts, findings = run(program(SAYS, **figures), tmp_path, {"a": 1.2, "b": 1.0, "e": 1.0})
    assert verdicts == {"a": "FELL", "b": "better", "c.d": "new", "e": "MISSING", "f": "MISSING"}
    assert [finding.partition(":")[0] for finding in findings] == ["probe.a", "probe.e", "probe.f"]
    assert "a table" in (tmp_path / "probe" / "output.log").read_text()


def test_whole_runs_are_held_against_what_is_asked_whatever_was_recorded(tmp_path: Path) -> None:
    figures = {"a": Figure(least=1), "b": Figure(most=1.9), "c.d": Figure(most=3), "e": Figure(least=0)}
    verdicts, findings = run(program(SAYS, **figures), tmp_path, {"a": 9}, brief=False)
    assert verdicts == {"a": "", "b": "MISSED", "c.d": "", "e": "MISSING"} and len(findings) == 2


@pytest.mark.parametrize("text", ["pass", "print('done')", "print([1])", SAYS + "; sys.exit(3)", "raise ValueError"])
def test_a_program_that_fails_or_says_nothing_is_a_finding(tmp_path: Path, text: str) -> None:
    findings = run(program(text), tmp_path)[1]
    assert len(findings) == 1 and str(tmp_path) in findings[0]


def test_a_program_that_hangs_is_stopped_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            """The bound is over as soon as the program has said something."""
            while timeout is not None and not (tmp_path / "probe" / "output.log").read_text().endswith("\n"):
                time.sleep(0.01)
            if timeout is not None:
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait()

    monkeypatch.setattr(parts.subprocess, "Popen", Impatient)
    child = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    text = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); signal.pause()"
    _, findings = run(program(text), tmp_path)
    assert "took too long" in findings[0]
    assert ended(int((tmp_path / "probe" / "output.log").read_text()))


def ended(pid: int) -> bool:
    """Whether the process is gone, or goes within the seconds that a killed one may take."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ready = poll.poll(10_000)
    os.close(descriptor)
    return bool(ready)


def test_a_run_is_read_from_the_summary_that_it_wrote_and_tests_from_the_counts_of_pytest(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"copy4-{number}").mkdir()
    (tmp_path / "copy4-1" / "summary.json").write_text('{"exact_match_after": 1.0}')
    assert parts.run_summary(tmp_path, "") == {"exact_match_after": 1.0}
    (tmp_path / "copy4-2" / "summary.json").write_text("{}")
    with pytest.raises(parts.NoFigures, match="2 runs"):
        parts.run_summary(tmp_path, "")
    output = "...\n=== 2 failed, 1,5 passed ===\n=== 2 failed, 15 passed, 1 skipped in 3.2s ==="
    assert parts.test_counts(tmp_path, output) == {"failed": 2, "passed": 15, "skipped": 1}
    assert parts.test_counts(tmp_path, "15 passed in 1 s") == {"failed": 0, "passed": 15, "skipped": 0}


BENCHMARK = """
import argparse, json, os, signal
parser = argparse.ArgumentParser()
parser.add_argument("--speed", type=float, default=3)
(speed,) = vars(parser.parse_args()).values()
if "two" in __file__ and os.path.exists("interrupt"):
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
print(json.dumps({"speed": speed}))
"""
LISTED = """
[NAME]
question = "?"
brief = "--speed 2"
figures = { speed = { what = "speed of NAME" } }
"""


@pytest.fixture
def checkouts(tmp_path: Path) -> Path:
    """Of a project with the benchmarks `one` and `two`: `new`, and `old`, whose programs lack the option."""
    for checkout in ("new", "old"):
        place = tmp_path / checkout / "scripts" / "bench"
        (place / "parts").mkdir(parents=True)
        for name in ("one", "two"):
            (place / f"{name}.py").write_text(
                BENCHMARK.replace("--speed", "--speed" if checkout == "new" else "--other")
            )
    place = tmp_path / "new" / "scripts" / "bench"
    for name in ("all.py", "parts/programs.py", "parts/table.py"):
        shutil.copy(BENCH / name, place / name)
    (place / "programs.toml").write_text("".join(LISTED.replace("NAME", name) for name in ("one", "two")))
    (place / "README.md").write_text(
        "\n".join(mark.format(name) for name in ("figures", "programs") for mark in bench.MARKS)
    )
    return tmp_path


def all_py(checkouts: Path, *arguments: str) -> tuple[int, str, dict]:
    """Exit code, output and record of all.py in the checkout `new`."""
    place = checkouts / "new" / "scripts" / "bench"
    command = [sys.executable, str(place / "all.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    record = place / "RECORD.json"
    return done.returncode, done.stdout + done.stderr, json.loads(record.read_text()) if record.exists() else {}


def test_a_record_is_what_later_runs_are_held_against_and_keeps_what_was_not_run(checkouts: Path) -> None:
    code, output, record = all_py(checkouts, "--record", "--rounds", "2")
    assert code == 0 and record.keys() == {"one", "two"}, output
    assert record["one"]["figures"] == {"speed": [2.0, 0.2]} and record["one"]["rounds"] == 2
    readme = (checkouts / "new" / "scripts" / "bench" / "README.md").read_text()
    assert "| speed of two | 2.0 ± 0.2 |  | `two.py` |" in readme
    toml = checkouts / "new" / "scripts" / "bench" / "programs.toml"
    toml.write_text(toml.read_text().replace("--speed 2", "--speed 1.9"))
    assert all_py(checkouts)[0] == 0
    toml.write_text(toml.read_text().replace("--speed 1.9", "--speed 1"))
    code, output, _ = all_py(checkouts, "one")
    assert code == 1 and "one.speed: fell, 1.0 ± 0.1; before 2.0 ± 0.2" in output and "two" not in output
    _, _, record = all_py(checkouts, "one", "--record")
    assert record["one"]["figures"]["speed"][0] == 1.0 and record["two"]["figures"]["speed"][0] == 2.0


def test_against_another_checkout_its_own_programs_run_in_turns_without_options_that_they_do_not_know(
    checkouts: Path,
) -> None:
    code, output, record = all_py(checkouts, "one", "--rounds", "2", "--against", str(checkouts / "old"))
    assert code == 1 and "one.speed: fell, 2.0 ± 0.2; before 3.0 ± 0.3" in output and record == {}
    turns = re.findall(r"^one, round (\d) of 2, (.*): \d", output, re.MULTILINE)
    assert turns == [("1", "now"), ("1", "the other checkout"), ("2", "the other checkout"), ("2", "now")]


def test_after_an_interruption_what_was_measured_is_shown_and_recorded(checkouts: Path) -> None:
    (checkouts / "new" / "interrupt").touch()
    _, output, record = all_py(checkouts, "--record")
    assert "interrupted" in output and "one.speed" in output and "two.speed" not in output
    assert record.keys() == {"one"}
