"""`titan-rl runs [DIRECTORY]`: the runs below a directory, the newest last.

Read-only, and nothing of a run is imported: a run whose recipe is gone is listed like any other. A run that holds its
lock is going on; one that does not and never said how it ended is dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import tomli

from titan_rl.config import LoggingConfig
from titan_rl.errors import ConfigError
from titan_rl.metrics.json_lines import TAIL, json_lines, json_object
from titan_rl.overrides import Command, Verb
from titan_rl.run.resume import how_to_go_on
from titan_rl.run_directory import CONFIG, ENDING, METRICS, SUMMARY, is_going_on


class State(StrEnum):
    """What has become of a run."""

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
    """One line of the list."""

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
    """The runs below a directory, the newest last."""
    return sorted(map(summarize, (file.parent for file in directory.glob(f"*/{CONFIG}"))), key=lambda run: run.started)


def summarize(run: Path) -> ListedRun:
    """What the files of a run say about it."""
    ending = json_object(run / ENDING)
    step, score = 0, None
    for _, line in json_lines(run / METRICS, start=-TAIL):
        step, score = line.get("step", step), line.get("evaluation/exact_match", score)
    try:
        steps = tomli.loads((run / CONFIG).read_text(encoding="utf-8"))["loop"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        steps = None
    return ListedRun(
        directory=run,
        state=_state(run, ending),
        how=str(ending.get("how", "")),
        step=step,
        steps=steps,
        score=score,
        started=datetime.fromtimestamp((run / CONFIG).stat().st_mtime),
    )


def _state(run: Path, ending: dict[str, Any]) -> State:
    if is_going_on(run):  # first, because a run that goes on keeps its former ending until it has begun
        return State.RUNNING
    if (code := ending.get("exit_code")) is not None:
        return State.DONE if code == 0 else State.STOPPED if code > 128 else State.FAILED
    return State.DONE if (run / SUMMARY).exists() else State.DEAD


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
