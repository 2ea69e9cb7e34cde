"""Every command and every snippet of every README works as it is written, as far as that goes without training.

A `python` block runs as a program of its own. A block after "Save this as `NAME`" is kept under that name, and the
commands of the README run beside it. What would train or serve is checked to the end by `--dry-run`; `tests/system`
trains the front page's task. Links lead to files.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

from titan_rl.cli import main
from titan_rl.config_registry import load_recipe
from titan_rl.overrides import to_toml
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted(
    path for path in ROOT.rglob("README.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SAVED_AS = re.compile(r"[Ss]ave this as `([\w.]+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
DRY = {"train", "serve"}
"""Verbs whose command would start processes."""
MODELS = re.compile(r"(runs/\S*checkpoint|\bDIR\b|/path/to/[\w.-]+)")
"""What a README calls a checkpoint of the reader's own."""
NOT_HERE = ("curl ", "source ", "python -m venv ", "gpu/bin/", "kill ")
"""Commands of the shell or of other projects; `pip install` is checked for the extras that it names."""


@dataclass(frozen=True)
class Snippet:
    readme: Path
    language: str
    text: str
    file: str
    """Where it is to be saved; empty: nowhere."""


def snippets(readme: Path) -> list[Snippet]:
    text = readme.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n\n")[2]
        named = SAVED_AS.search(before)
        found.append(Snippet(readme, match[1], match[2], named[1] if named else ""))
    return found


def commands(text: str) -> list[str]:
    """The commands of a block, comments taken away, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    stripped = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in lines)
    return [line for line in stripped if line]


def name(readme: Path) -> str:
    return str(readme.relative_to(ROOT))


@pytest.fixture(scope="module")
def model() -> Path:
    return make_tiny_policy(TinyPolicyConfig(max_length=4096))


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A directory that looks like the root of the project and can be written, with a run that was killed early."""
    for entry in ("rl_configs", "scripts", "titan_rl"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    killed = tmp_path / "runs" / "copy4_async-x"
    killed.mkdir(parents=True)
    (killed / "config.toml").write_text(to_toml(load_recipe("copy4_async")))
    return tmp_path


def run(arguments: list[str], where: Path, **variables: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=where, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"


def run_verb(arguments: list[str], where: Path, **variables: str) -> None:
    """`titan-rl …` in a fork of this process, which has imported the command line."""
    log = where / "output.log"
    if (pid := os.fork()) == 0:
        code = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = (os.fdopen(each, "w", buffering=1) for each in (1, 2))
            os.chdir(where)
            os.environ.update({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables})
            sys.path[:] = [each for each in sys.path if each != str(ROOT / "tests" / "packaging")]
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0, f"titan-rl {shlex.join(arguments)}\n{log.read_text()}"


def run_command(command: str, desk: Path, model: Path) -> None:
    command = MODELS.sub(str(model), command.replace("…", "x"))
    variables = {}
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        variable, _, value = words.pop(0).partition("=")
        variables[variable] = value
    program, *arguments = words
    if "pip install" in command:
        extras = set(re.findall(r"\[([\w,-]+)\]", command))
        declared = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{extra} = [" in declared for extra in extras), command
        return
    if command.startswith(NOT_HERE):
        return
    if program.removeprefix("./").startswith("scripts/") or (
        program == "python" and arguments[0].startswith("scripts/")
    ):
        script = Path((program if program != "python" else arguments[0]).removeprefix("./"))
        assert (ROOT / script).is_file() and (program == "python" or os.access(ROOT / script, os.X_OK)), command
        if script.suffix == ".py":
            run([str(script), "--help"], desk, **variables)
        return
    if program != "titan-rl":  # python -m titan_rl.train, or torchrun … -m titan_rl.train
        place = next((place for place, word in enumerate(arguments) if word.startswith("titan_rl.")), None)
        assert program in ("python", "torchrun") and place, f"{command}: nobody knows how to try {program}"
        if program == "torchrun":
            dry = ["-m", "torch.distributed.run", *arguments, "--dry-run"]
            return run(dry, desk, **variables)
        arguments = [arguments[place].rpartition(".")[2], *arguments[place + 1 :]]
    verb = arguments[0]
    if verb in ("export", "eval", "replay", "watch"):
        arguments = [verb, "--help"]  # that run has no checkpoint, and has recorded nothing
    if verb == "plan":
        arguments += ["--steps", "2"]  # 20 would be simulated for as many seconds
    if verb in DRY and not {"--help", "--dry-run"} & {*arguments}:
        arguments.append("--dry-run")
    run_verb(arguments, desk, **variables)


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_every_snippet_and_command_works_as_written(readme: Path, desk: Path, model: Path) -> None:
    found = snippets(readme)
    for number, snippet in enumerate(found):
        if snippet.file or snippet.language == "python":
            (desk / (snippet.file or f"snippet{number}.py")).write_text(snippet.text)
    for number, snippet in enumerate(found):
        if snippet.language == "python":
            run([snippet.file or f"snippet{number}.py"], desk)
        elif snippet.language == "bash":
            for command in commands(snippet.text):
                run_command(command, desk, model)


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_every_link_leads_to_a_file(readme: Path) -> None:
    missing = [link for link in LINK.findall(readme.read_text()) if not (readme.parent / link).exists()]
    assert missing == []


def test_the_front_page_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1300


def test_what_the_manual_calls_a_command_can_be_run() -> None:
    named = re.findall(r"^\| `(scripts/\w+\.\w+)`", (ROOT / "scripts" / "README.md").read_text(), re.MULTILINE)
    assert len(named) > 5
    for each in named:
        assert os.access(ROOT / each, os.X_OK) and (ROOT / each).read_text().startswith("#!"), each
