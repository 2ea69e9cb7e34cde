"""Which run goes on, from which checkpoint, and whether its settings may be others than before.

    --resume RUN          a run directory: from its newest checkpoint that is as it was written; from the beginning,
                          if none was written yet
    --resume CHECKPOINT   one of its checkpoints
    --resume auto         the newest unfinished run of this recipe and config, one with a checkpoint first (another may
                          have failed at its start), or else a new run

Nothing of the run is changed before the trainer has what the checkpoint holds (`begun`). Then checkpoints after the one
that was taken are removed: the run leaves their way.

A setting that decides what is computed stays as it was: groups in flight, moments and ages are those of the old one.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config import RunConfig
from titan_rl.errors import CheckpointError, ConfigError
from titan_rl.generation.config import MAY_DIFFER
from titan_rl.loop.checkpoint_files import (
    CHECKPOINTS,
    MANIFEST,
    Checkpoint,
    check,
    checkpoints,
    directory_of,
    newest_sound,
    prune,
)
from titan_rl.overrides import flat
from titan_rl.run_directory import CONFIG, ENDING, SUMMARY

MAY_CHANGE = (
    "checkpoint.",
    "data_plane.",
    "evaluation.",
    *(f"generator.{name}" for name in MAY_DIFFER),
    "generator.keep_prefix_cache",
    "logging.",
    "loop.steps",
    "loop.watchdog_seconds",
    "placement.",
    "rollout.agents.",
    "rollout.workers",
    "router.",
    "weights.",
)
"""Settings, and sections, that change nothing of what a deterministic run computes from its next step on; but for
`loop.steps` where the learning rate falls towards the end of the run, which is another end then."""

CLOSE = (
    "trainer.data_parallel",
    "trainer.tensor_parallel",
    "trainer.max_tokens_per_microbatch",
    "trainer.activation_checkpointing",
)
"""Settings that change the order of additions, and so the last bits."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A run that goes on."""

    run: Path
    """Its directory."""
    chosen: Checkpoint | None = None
    """None: the newest sound one."""

    def checkpoint(
        self, say: Callable[[str], None], read: Callable[[Path], object] = lambda directory: None
    ) -> Checkpoint | None:
        """The one that was named, else the newest that is as it was written; None: there is none.

        Args:
            say: told of those that are passed over.
            read: raises CheckpointError for one that cannot be read though it is as it was written.

        Raises:
            ConfigError: there are some, and none of them can be read; or the one that was named cannot.
        """
        if self.chosen is not None:
            try:
                read(self.chosen.directory)
            except CheckpointError as error:
                raise ConfigError(f"--resume: {error}") from error
            return self.chosen
        found = newest_sound(self.run, say, read)
        if found is None and checkpoints(self.run):
            raise ConfigError(
                f"{self.run}: none of its checkpoints can be read, so it cannot go on; start a new run, or move "
                f"{self.run / CHECKPOINTS} away to start this one over"
            )
        return found

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


def how_to_go_on(run: Path) -> str:
    """What can be done with a run that has ended."""
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
    """The run that `--resume PATH` names.

    Raises:
        ConfigError: it is neither a run directory nor a checkpoint, or a damaged one.
    """
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
    """A setting that is another one now."""

    setting: str
    before: Any
    now: Any

    @property
    def allowed(self) -> bool:
        return self.setting.startswith((*MAY_CHANGE, *CLOSE))

    @property
    def close(self) -> bool:
        """Whether the run goes on with other last bits."""
        return self.setting.startswith(CLOSE)

    def __str__(self) -> str:
        return f"{self.setting} {self.before!r} → {self.now!r}"


def differences(before: RunConfig, now: RunConfig) -> list[Difference]:
    """Settings that differ."""
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
