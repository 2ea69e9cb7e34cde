""".ci/tests.py: a second try and an unlisted skip are failures (10 s)."""

import importlib.util
import sys
from datetime import date
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("ci_tests", Path(__file__).resolve().parents[2] / ".ci" / "tests.py")
ci = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = ci
spec.loader.exec_module(ci)

FLAKY = """
from pathlib import Path
def test_passes_the_second_time():
    tried = Path(__file__).with_name("tried")
    if not tried.exists():
        tried.touch()
        raise AssertionError
"""
SKIPS = "import pytest\n@pytest.mark.skip(reason='no disk')\ndef test_it(): pass\n"


@pytest.mark.parametrize(
    ("tests", "flakes", "skips", "code"),
    [
        ("def test_it(): pass", "", "", 0),
        ("def test_it(): assert False", "", "", 1),
        (FLAKY, "", "", 3),
        (FLAKY, f"{date.today()} test_one.py::test_passes_the_second_time it is looked into", "", 0),
        (FLAKY, "2026-01-01 test_one.py::test_passes_the_second_time it is looked into", "", 3),
        (SKIPS, "", "", 4),
        (SKIPS, "", "test_*.py no disk", 0),
        ("def test_it(", "", "", 2),
    ],
)
def test_the_exit_code_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tests: str, flakes: str, skips: str, code: int
) -> None:
    for name, text in {"test_one.py": tests, "flakes.txt": flakes, "skips.txt": f"# why\n{skips}\n"}.items():
        (tmp_path / name).write_text(text)
    for name, value in {
        "ROOT": tmp_path,
        "RESULTS": tmp_path / "results",
        "FLAKES": tmp_path / "flakes.txt",
        "SKIPS": tmp_path / "skips.txt",
        "IN_TWO": ("-p", "no:xdist"),
    }.items():
        monkeypatch.setattr(ci, name, value)
    monkeypatch.setattr(sys, "argv", ["tests.py"])
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # their imports take longer than these tests
    assert ci.main() == code
