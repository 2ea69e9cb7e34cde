"""The runs of a directory: what has become of each (`titan-rl runs`), which one goes on, from which checkpoint, and
whether its settings may be others than before.

- Nothing of the run is changed before the trainer has what the checkpoint holds (`begun`).
- The list is made from the files of the runs alone, so that one whose recipe is gone is listed too. A run that holds
  its lock is going on; one that does not and never said how it ended is dead.
- A setting that decides what is computed stays as it was: groups in flight, moments and ages are those of the old one.
"""

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import tomli

from titan_rl.config import LoggingConfig, RunConfig
from titan_rl.directories import CONFIG, ENDING, METRICS, SUMMARY, is_going_on, write_file
from titan_rl.errors import CheckpointError, ConfigError
from titan_rl.generation.config import MAY_DIFFER
from titan_rl.loop.checkpoint_files import CHECKPOINTS, MANIFEST, Checkpoint, check, checkpoints, directory_of, prune
from titan_rl.metrics.json_lines import TAIL, json_lines, json_object
from titan_rl.overrides import Command, Verb, flat, to_toml

_TABLE = tomli.loads(Path(__file__).with_name("resume.toml").read_text(encoding="utf-8"))
MAY_CHANGE = (*_TABLE["may_change"], *(f"generator.{name}" for name in MAY_DIFFER))
CLOSE = tuple(_TABLE["close"])


@dataclass(frozen=True, slots=True)
class Resume:
    run: Path
    chosen: Checkpoint | None = None
    """None: the newest sound one."""

    def checkpoint(
        self, say: Callable[[str], None], read: Callable[[Path], object] = lambda directory: None
    ) -> Checkpoint | None:
        """The one that was named, else the newest that is as it was written and can be read (`read` raises no
        CheckpointError); None: there is none. `say`: told of those that are passed over. Raises ConfigError: there are
        some, and none of them can be read; or the one that was named cannot."""
        if self.chosen is not None:
            try:
                read(self.chosen.directory)
            except CheckpointError as error:
                raise ConfigError(f"--resume: {error}") from error
            return self.chosen
        for directory in reversed(checkpoints(self.run)):
            try:
                found = check(directory)
                read(directory)
                return found
            except CheckpointError as error:
                say(f"{error}; it is passed over")
        if checkpoints(self.run):
            raise ConfigError(
                f"{self.run}: none of its checkpoints can be read, so it cannot go on; start a new run, or move "
                f"{self.run / CHECKPOINTS} away to start this one over"
            )
        return None

    def check_steps(self, steps: int) -> None:
        """Raises ConfigError if the run has done more than `steps` steps where it goes on."""
        newest = self.chosen.directory if self.chosen else next(reversed(checkpoints(self.run)), None)
        if newest is not None and newest.name > directory_of(self.run, steps).name:
            raise ConfigError(
                f"loop.steps = {steps} is less than {self.run} has done ({newest.name}): ask for more steps, or name "
                "an earlier checkpoint"
            )


def begun(run: Path, checkpoint: Checkpoint | None) -> None:
    """A run goes on from this checkpoint, or has started over: remove what says how it went on and ended before."""
    if checkpoint is not None:
        prune(run, keep=checkpoint.step + 1, newest=checkpoint.step)
    for file in (SUMMARY, ENDING):
        (run / file).unlink(missing_ok=True)


def write_config(directory: Path, config: RunConfig) -> None:
    """Raises StorageError."""
    write_file(directory / CONFIG, to_toml(config))


def how_to_go_on(run: Path) -> str:
    newest = next(reversed(checkpoints(run)), None)
    command = f"titan-rl train --resume {shlex.quote(str(run))}"
    if not (run / CONFIG).is_file():
        return "there is nothing to go on from: start it again"
    if (run / SUMMARY).is_file():
        if newest:
            return f"{command} --loop.steps N trains it further"
        return "a new run goes on from its weights" if (run / "checkpoint").is_dir() else "it cannot be trained further"
    return f"{command} goes on from {newest.name}" if newest else f"{command} starts it over: it has no checkpoint"


def find(path: Path) -> Resume:
    """The run that `--resume PATH` names. Raises ConfigError if it is no run directory and no sound checkpoint."""
    path = Path(os.path.abspath(path.expanduser()))  # not resolved: checkpoints may be a link to another disk
    if path.parent.name == CHECKPOINTS:
        try:
            return Resume(path.parent.parent, check(path))
        except CheckpointError as error:
            raise ConfigError(f"--resume: {error}") from error
    if (path / MANIFEST).is_file():
        raise ConfigError(f"--resume {path}: a checkpoint goes on in its run; put it into RUN/{CHECKPOINTS}")
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} is no run directory: there is no {CONFIG}")
    return Resume(path)


def unfinished(directory: Path) -> Iterator[Path]:
    """The runs below `logging.directory` that are not done: those with a checkpoint first, then the newest first."""
    runs = [file.parent for file in directory.glob(f"*/{CONFIG}")]
    for run in sorted(runs, key=lambda run: (bool(checkpoints(run)), (run / CONFIG).stat().st_mtime), reverse=True):
        if not (run / SUMMARY).exists():
            yield run


@dataclass(frozen=True, slots=True)
class Difference:
    setting: str
    before: Any
    now: Any

    @property
    def allowed(self) -> bool:
        return self.setting.startswith((*MAY_CHANGE, *CLOSE))

    def __str__(self) -> str:
        close = " (its results are close to those before, not bitwise)" * self.setting.startswith(CLOSE)
        return f"{self.setting} {self.before!r} → {self.now!r}{close}"


def differences(before: RunConfig, now: RunConfig) -> list[Difference]:
    old, new = (dict(flat(dataclasses.asdict(config))) for config in (before, now))
    return [
        Difference(name, old.get(name), new.get(name))
        for name in dict.fromkeys((*old, *new))
        if name != "recipe" and old.get(name) != new.get(name)
    ]


def check_differences(found: Sequence[Difference], run: Path) -> None:
    """Raises ConfigError for settings that must stay as they were."""
    if refused := [str(difference) for difference in found if not difference.allowed]:
        raise ConfigError(
            f"{run} cannot go on with other settings of what it computes: {', '.join(refused)}; leave them as they "
            f"were, or start a new run from its weights (titan-rl export)"
        )


class State(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """It ended with an error, or below `evaluation.target_exact_match`."""
    STOPPED = "stopped"
    """By Ctrl-C or another signal; it saved what it had."""
    DEAD = "dead"
    """It could not even say so: killed, or its host went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    directory: Path
    state: State
    how: str
    """How it ended, in words; empty: nobody said."""
    step: int
    steps: int | None
    score: float | None
    """Held-out exact match of the newest evaluation; None: there was none lately."""
    started: datetime
    """When it started, or last went on."""


def list_runs(directory: Path) -> list[ListedRun]:
    return sorted(map(summarize, (file.parent for file in directory.glob(f"*/{CONFIG}"))), key=lambda run: run.started)


def summarize(run: Path) -> ListedRun:
    ending = json_object(run / ENDING)
    if is_going_on(run):  # first, because a run that goes on keeps its former ending until it has begun
        state = State.RUNNING
    elif (code := ending.get("exit_code")) is not None:
        state = State.DONE if code == 0 else State.STOPPED if code > 128 else State.FAILED
    else:
        state = State.DONE if (run / SUMMARY).exists() else State.DEAD
    step, score = 0, None
    for _, line in json_lines(run / METRICS, start=-TAIL):
        # an evaluation may be over after a later step
        step, score = max(step, line.get("step", 0)), line.get("evaluation/exact_match", score)
    try:
        steps = tomli.loads((run / CONFIG).read_text(encoding="utf-8"))["loop"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        steps = None
    how, started = str(ending.get("how", "")), datetime.fromtimestamp((run / CONFIG).stat().st_mtime)
    return ListedRun(directory=run, state=state, how=how, step=step, steps=steps, score=score, started=started)


def _act(command: Command, prog: str) -> int:
    directory = Path(command.word("directory", LoggingConfig().directory)).expanduser()
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory; `titan-rl train` makes its runs below logging.directory")
    runs = list_runs(directory)
    if not runs:
        raise ConfigError(f"there is no run directly below {directory}")
    rows = [("run", "state", "step", "score", "started")]
    for run in runs:
        score = "–" if run.score is None else f"{run.score:.3f}"
        of = f"{run.step}/{run.steps or '?'}"
        rows.append((run.directory.name, run.state.value, of, score, f"{run.started:%Y-%m-%d %H:%M}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, listed in zip(rows, [None, *runs], strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if listed is not None and listed.state is not State.RUNNING:
            if listed.how and listed.state is State.FAILED:
                print(f"    {listed.how}")
            print(f"    {how_to_go_on(listed.directory)}")
    return 0


VERB = Verb(
    act=_act,
    about="""
usage: {prog} [DIRECTORY]

List the runs below a directory (runs), the newest last: state, finished steps, newest held-out exact match, when it
started or last went on; and, of those that have ended, how to go on.

states: running; done; failed: an error, or below its target; stopped by a signal; dead: killed, or its host is gone""",
    takes_words=True,
    takes_settings=False,
)
