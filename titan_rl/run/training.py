"""The training of a run: one loop, and another one from the newest checkpoint whenever a rollback is needed.

    fatal fault, signal ─▶ announced ─▶ weights saved ─▶ rollouts stopped, samples released ─▶ meshes closed

A run is done when its steps are trained, its last evaluation is over and its weights are saved. Whatever ends it, what
there is is saved, as long as the trainer lives.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from titan_rl.config import RunConfig
from titan_rl.directories import CONFIG, write_ending
from titan_rl.errors import (
    CheckpointError,
    ConfigError,
    NothingToTrain,
    RollbackNeeded,
    Stopped,
    TitanError,
    TrainingError,
)
from titan_rl.loop.checkpoint_files import Checkpoint
from titan_rl.loop.checkpoints import Checkpoints
from titan_rl.loop.ledger import new_ledger, read_ledger
from titan_rl.loop.loop import TrainingLoop
from titan_rl.loop.recording import Recorder
from titan_rl.loop.system import System
from titan_rl.metrics.rollout_record import RolloutWriter
from titan_rl.metrics.writer import MetricsWriter
from titan_rl.one_line import counted
from titan_rl.run.runs import Resume, begun, write_config
from titan_rl.run.start import bring_up
from titan_rl.supervision.run_end import RunEnd, until_either
from titan_rl.view.display import RunDisplay
from titan_rl.view.findings import Kind, findings
from titan_rl.view.read import read_run

if TYPE_CHECKING:
    from titan_rl.supervision.supervisor import Supervisor

NOTHING_SAVED = "no weights were saved"

MOST_ROLLBACKS_IN_VAIN = 3
"""A run ends when it has to go back so often in a row without a step between: the cause is not going to go away."""

SAVE_SECONDS = 120.0
"""Time limit for each thing that a stopped or failed run saves, including the step that is under way. Enough for a few
GB. Another signal ends the wait sooner."""

ADVICE_SECONDS = 15.0
"""Between two looks at what a run has written: what keeps it from learning is said once, as the report will."""

ADVICE_SHARE = 0.01
"""Most of the time that looks may take; a long run has much to read."""

Save = Callable[[], Coroutine[Any, Any, str]]
"""Saves something that needs the trainer; returns where it is, in words."""

_log = logging.getLogger(__name__)


class Training:
    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        checkpoint: Checkpoint | None,
        console: Console,
        *,
        replay_until: int = 0,
        incarnation: int = 0,
    ) -> None:
        """`checkpoint`: from which the run goes on; None: it begins, as this incarnation. `replay_until`: see `run`."""
        self.saved = NOTHING_SAVED
        """Where the weights are that were saved last, in words."""
        self._config = config
        self._directory = directory
        self._replay_until = replay_until
        self._said: set[str] = set()  # titles of findings
        self._display = RunDisplay(steps=config.loop.steps, live=config.logging.progress, console=console)
        self._prepare(checkpoint, incarnation=incarnation)

    async def run(self, run_end: RunEnd) -> TrainingLoop:
        """Train to the end and save; returns the loop that came there. Raises as `train_and_save`."""
        display, logs = self._display, self._directory / "logs"
        try:
            with display:
                async with bring_up(
                    self._config, log_directory=logs, run_end=run_end, on_mesh=display.mesh, say=display.print_line
                ) as meshes:
                    return await self._until_done(meshes)
        finally:
            self._metrics.close()

    async def trial(self, meshes: Supervisor) -> str:
        """Train to the end on meshes that go on after it, and save nothing. Returns why it failed, or nothing. Raises
        RollbackNeeded: what the trial had is lost, and it may be made again; else what ends the meshes."""
        meshes.start_over(self._config)
        system = meshes.system()
        loop, recorder = self._make_loop(system)

        async def failure() -> str:  # which is none of the meshes, so that they announce nothing
            try:
                await loop.run()
            except RollbackNeeded:
                raise
            except TitanError as error:
                return str(error) or type(error).__name__
            return ""

        try:
            why = await meshes.run_end.watch(failure())
            await loop.leave()
            await recorder.settled()
        finally:
            self._metrics.close()
        write_ending(self._directory, bool(why), f"failed: {why}" if why else "is done, a trial")
        return why

    async def _until_done(self, meshes: Supervisor) -> TrainingLoop:
        system, say = meshes.system(), self._display.print_line
        in_vain = 0
        while True:
            began = self._ledger.buffer.trainer_version.step
            loop, recorder = self._make_loop(system)
            advice = asyncio.create_task(self._advise())
            try:
                await train_and_save(loop, meshes, self._saves(loop, system), say)
                self._metrics.sync()
                return loop
            except NothingToTrain:
                await self.look(Kind.PROBLEM, Kind.WARNING)
                raise
            except RollbackNeeded as cause:
                reached = loop.ledger.buffer.trainer_version.step
                in_vain = 0 if reached > began else in_vain + 1
                if in_vain == MOST_ROLLBACKS_IN_VAIN:
                    raise
                say(f"going back to the newest checkpoint: {cause}")
                self._metrics.close()
                await recorder.settled()
                try:
                    checkpoint = await asyncio.to_thread(Resume(self._directory).checkpoint, say, read_ledger)
                except ConfigError as error:  # no mistake of the config's, as it would be at the start
                    raise CheckpointError(str(error)) from cause
                again = reached - (checkpoint.step if checkpoint else 0)
                say(f"{counted(again, 'finished step')} {'is' if again == 1 else 'are'} done again")
                self._prepare(checkpoint, incarnation=system.trainer.version.incarnation + 1)
            finally:
                advice.cancel()

    async def _advise(self) -> None:
        """Say what keeps the run from learning, while it goes on."""
        took = 0.0
        while True:
            await asyncio.sleep(max(ADVICE_SECONDS, took / ADVICE_SHARE))
            began = time.monotonic()
            await self.look()
            took = time.monotonic() - began

    async def look(self, *kinds: Kind) -> None:
        """Say findings of these kinds, or problems. A look that fails costs its advice and not the run."""
        try:
            run = await asyncio.to_thread(read_run, self._directory, brief=True)
            new = [each for each in findings(run) if each.title not in self._said]
            found = [each for each in new if each.kind in (kinds or (Kind.PROBLEM,))]
        except Exception as error:
            return _log.warning("the run could not be looked at", exc_info=error)
        for each in found:
            self._said.add(each.title)
            self._display.print_line(str(each))

    def _prepare(self, checkpoint: Checkpoint | None, *, incarnation: int = 0) -> None:
        """Read what the next loop begins with, and cut the metrics back to it."""
        config = self._config
        self._checkpoint = checkpoint
        self._ledger = new_ledger(config, incarnation) if checkpoint is None else read_ledger(checkpoint.directory)
        if self._replay_until:
            self._ledger.replay(self._replay_until, config.loop.steps)
        self._metrics = MetricsWriter(
            self._directory,
            tensorboard=config.logging.tensorboard,
            wandb_project=config.logging.wandb_project,
            config=dataclasses.asdict(config),
            keep_bytes=self._ledger.metrics_bytes,
            warn=self._display.print_line,
        )

    def _make_loop(self, system: System) -> tuple[TrainingLoop, Recorder]:
        config, directory, checkpoint, metrics = self._config, self._directory, self._checkpoint, self._metrics
        say = self._display.print_line
        writer = RolloutWriter(directory, keep_bytes=self._ledger.rollouts_bytes, warn=say)
        recorder = Recorder(system.rollouts, writer, each=config.logging.rollouts, only=self._replay_until)
        checkpoints = Checkpoints(directory, system, metrics=metrics, say=say, recorder=recorder)

        def on_start() -> None:
            write_config(directory, config)  # it may fail, on a full disk
            begun(directory, checkpoint)

        loop = TrainingLoop(
            system,
            display=self._display,
            metrics=metrics,
            checkpoints=checkpoints if config.checkpoint.keep else None,
            ledger=self._ledger,
            recorder=recorder,
            restore_from=checkpoint and checkpoint.directory,
            on_start=on_start,
        )
        return loop, recorder

    def _saves(self, loop: TrainingLoop, system: System) -> dict[str, Save]:
        async def save_weights() -> str:
            if not loop.has_weights:
                return ""
            weights = self._directory / "checkpoint"
            self.saved = f"the weights after step {await system.trainer.save(weights)} are in {weights}"
            if not (self._directory / CONFIG).exists():  # somebody removed the run directory, which is there again
                write_config(self._directory, self._config)
            return self.saved

        saves: dict[str, Save] = {"the weights were": save_weights} if self._config.logging.save_final else {}
        return saves | {"a last checkpoint was": loop.save}


async def train_and_save(
    loop: TrainingLoop, meshes: Supervisor, saves: Mapping[str, Save], say: Callable[[str], None]
) -> None:
    """Train to the end, and save what there is, even if training fails or is stopped. `saves`: by what each saves, as
    "the weights were". Raises Stopped: a signal ended the loop; TitanError, OSError: training or saving failed;
    RollbackNeeded: nothing was saved, and the run has not ended: another loop has to go on from an earlier step."""
    end = meshes.run_end
    failure: Exception | None = None
    unsaved: Exception | None = None
    try:
        await end.watch(loop.run())
    except RollbackNeeded:
        raise
    except Exception as error:
        failure = error
    for what, save in saves.items():
        try:
            if failure is None:
                work, seconds = end.unless_given_up("trainer", save()), None
            else:  # it waits for no replacement
                work, seconds = meshes.unless_lost("trainer", save()), SAVE_SECONDS
            async with until_either(work, end.hurry.wait(), seconds) as saving:
                if not saving.done():
                    late = f"the trainer did not answer within {seconds or 0:g} s"
                    raise TrainingError("another signal asked not to wait for it" if end.hurry.is_set() else late)
                if where := saving.result():
                    say(where)
        except Exception as error:
            _log.error("%s not saved", what, exc_info=error)
            say(f"{what} not saved: {error}")
            unsaved = unsaved or error
    heard = end.settle()
    if isinstance(heard, Stopped) and unsaved is None:
        heard = None  # the signal came while the last weights were being saved, and changed nothing
    cause = failure or heard or unsaved
    await loop.end(failed=cause is not None)
    if cause is not None:
        raise cause
