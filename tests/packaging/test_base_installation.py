"""The quick start learns, and needs nothing that only `scripts/setup.sh --all` installs (60 s)."""

import importlib.metadata
import json
import re
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_the_base_installation_learns_the_quick_start(tmp_path):
    places = [files_of(name) for name in ("requirements.lock", "requirements-all.lock")]
    venv.create(tmp_path / "venv", symlinks=True)
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    shared = {path.parts[0] for path in places[0]} & {path.parts[0] for path in places[1]}
    for path in {path if path.parts[0] in shared else Path(path.parts[0]) for path in places[0]}:
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).symlink_to(importlib.metadata.distribution("torch").locate_file(path))
    python = tmp_path / "venv" / "bin" / "python"
    assert subprocess.run([python, "-c", "import hypothesis"], capture_output=True).returncode == 1
    command = [python, "-m", "titan_rl.train", "--recipe", "copy4_quick"]
    run = subprocess.run(
        [*command, "--logging.directory", tmp_path / "runs"], cwd=ROOT, capture_output=True, text=True, timeout=540
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (directory,) = (tmp_path / "runs").iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["exact_match_before"] < 0.1 < 0.95 <= summary["exact_match_after"]
    assert (directory / "report.html").exists()


def files_of(lock: str) -> list[Path]:
    """Of its packages, relative to site-packages and within."""
    names = re.findall(r"^([\w-]+)==", (ROOT / "scripts" / lock).read_text(), re.MULTILINE)
    paths = [Path(file) for name in names for file in importlib.metadata.files(name) or ()]
    return [path for path in paths if path.parts[0] not in ("..", "__pycache__")]
