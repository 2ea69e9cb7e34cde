"""One run, or one service, from a config to an exit code: run directory, logs, signals, work, final messages.

A run that goes on (`resume`) does so in its own directory.

Exit codes: 0 done, 1 failed or not learned, 2 wrong config, 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP (a
service that is stopped: 0). However a run ends, its directory holds the resolved config, every finished step and the
logs, and also the trainer's newest weights if the trainer still lives. No process of the run is left. Its last two
lines say what ended it, what was saved and how to go on, and where its report is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from titan_rl.config import RunConfig
from titan_rl.directories import CONFIG, ENDING, METRICS, SUMMARY, lock_run
from titan_rl.errors import CheckpointError, ConfigError, RollbackNeeded, Stopped, StorageError
from titan_rl.gateway.config import GatewayConfig
from titan_rl.loop.checkpoint_files import Checkpoint
from titan_rl.loop.checkpoints import Checkpoints
from titan_rl.loop.ledger import Ledger, new_ledger, read_ledger
from titan_rl.loop.loop import TrainingLoop
from titan_rl.loop.recording import Recorder
from titan_rl.loop.system import System
from titan_rl.metrics.rollout_record import RolloutWriter
from titan_rl.metrics.timeline import SPANS, timeline
from titan_rl.metrics.waits import answer_signals
from titan_rl.metrics.writer import MetricsWriter
from titan_rl.one_line import counted, one_line
from titan_rl.overrides import to_toml
from titan_rl.run.runs import Resume, begun, how_to_go_on
from titan_rl.run.start import bring_up
from titan_rl.supervision.process import hold_signals, lasting_output, log_to_file, report_stop_signals
from titan_rl.supervision.run_end import Announcer, RunEnd, Save, train_and_save
from titan_rl.view.display import RunDisplay
from titan_rl.view.report import REPORT, write_report
from titan_rl.view.timelines import write_trace
from titan_rl.weights.segment_files import remove_segments_of

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

LONGEST_CAUSE = 400
"""Characters of an error in the line that says what ended the run. The logs have all of it."""

MOST_IN_VAIN = 3
"""A run ends when it has to go back so often in a row without a step between: the cause is not going to go away."""

DETERMINISTIC_HINT = (
    "deterministic = true: the run repeats bit for bit; on CPU sampling is 2–6 % slower in float32, 16–37 % in bfloat16"
)
"""As scripts/bench/deterministic.py measures it."""

_log = logging.getLogger(__name__)


def run(
    config: RunConfig, imports: tuple[str, ...] = (), resume: Resume | None = None, *, replay_until: int = 0
) -> int:
    """Do the whole run, or the rest of one; returns the exit code.

    Args:
        replay_until: do again what was done, and end after this step; 0: go on.

    Raises:
        ConfigError: the run cannot go on: none of its checkpoints can be read. Nothing of it was changed.
    """
    started = time.monotonic()
    console = Console()

    saved: list[str] = []

    async def work(directory: Path, run_end: RunEnd) -> tuple[int, str]:
        say(f"run directory: {directory}")
        if config.logging.spans:
            timeline.begin(directory / SPANS, "controller")
            timeline.follow(lambda: "the meshes")
        if resume is None:
            write_config(directory, config)
        elif checkpoint is None:
            say("there is no checkpoint yet: the run starts over")
        if config.deterministic:
            say(DETERMINISTIC_HINT)
        loop = await _train(config, imports, directory, checkpoint, console, run_end, saved, replay_until)
        if replay_until:
            return EXIT_OK, f"has played step {replay_until}"
        return _conclude(config, loop, directory, console, started)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def last_lines(how: str, directory: Path) -> Iterator[str]:
        if replay_until:
            yield f"the replay {how}"
            return
        yield f"the run {how}; {saved[-1] if saved else 'no weights were saved'}; {how_to_go_on(directory)}"
        yield from _report(directory)

    checkpoint = None if resume is None else resume.checkpoint(say, read_ledger)
    stopping = "saving the newest weights, then closing; once more: closing without saving"
    directory = None if resume is None else resume.run
    return conduct(config, work, last_lines, say=say, stopping=stopping, directory=directory)


def run_service(config: RunConfig, gateway: GatewayConfig, imports: tuple[str, ...] = ()) -> int:
    """Serve until a signal; returns the exit code."""

    def say(text: str) -> None:
        print(text, flush=True)

    async def work(directory: Path, run_end: RunEnd) -> tuple[int, str]:
        async with bring_up(
            config,
            gateway,
            imports=imports,
            log_directory=directory / "logs",
            run_end=run_end,
            on_mesh=lambda mesh, doing: say(f"{mesh}: {doing or 'has left'}"),
            say=say,
        ) as up:
            key = "with the API key" if gateway.api_key else "without an API key"
            say(f"serving {gateway.model} at {up.gateway.url}/v1, {key}; Ctrl-C stops it")
            await run_end.watch(asyncio.Event().wait())
        return EXIT_OK, "is over"

    def last_lines(how: str, directory: Path) -> Iterator[str]:
        yield f"the service {how}; it keeps nothing; logs: {directory / 'logs'}"

    named = dataclasses.replace(config, recipe="serve")
    code = conduct(named, work, last_lines, say=say, stopping="closing")
    return EXIT_OK if code > 128 else code


@lasting_output()
def conduct(
    config: RunConfig,
    work: Callable[[Path, RunEnd], Coroutine[Any, Any, tuple[int, str]]],
    last_lines: Callable[[str, Path], Iterator[str]],
    *,
    say: Callable[[str], None],
    stopping: str,
    directory: Path | None = None,
) -> int:
    """Do the work in a run directory; returns the exit code.

    Args:
        work: called with the run directory and what collects faults and signals; returns the exit code, and how it
            ended, in words.
        last_lines: given how it ended, the last words; each line is said before the next is asked for.
        stopping: text that says what happens after a stop signal.
        directory: of the run; None: make a new one.
    """
    hold_signals()
    remove_segments_of(os.getpid())  # of a dead run with this process id: a container that started again has the same
    directory = directory or make_run_directory(config)
    lock = lock_run(directory)
    announce = Announcer(say, stopping=stopping)

    async def until_the_end() -> tuple[int, str]:
        run_end = RunEnd(announce)
        report_stop_signals(run_end.report)
        return await work(directory, run_end)

    try:
        log = directory / "logs" / "controller.log"
        log_to_file(log)
        answer_signals("controller", log=log)
        code, how = asyncio.run(until_the_end())
    except Stopped as stop:
        code, how = stop.exit_code, f"was stopped by {stop}"
    except Exception as error:
        announce(error)
        _log.error("the run failed", exc_info=error)
        say(f"logs: {directory / 'logs'}")
        code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
        how = f"failed: {type(error).__name__}: {one_line(str(error), LONGEST_CAUSE)}"
    if timeline.is_on:
        timeline.end()
        write_trace(directory)
    if not ((directory / SUMMARY).exists() and (directory / ENDING).exists()):  # else it was over, and has not gone on
        with suppress(StorageError):  # on a full disk
            _write(directory / ENDING, json.dumps({"exit_code": code, "how": how}) + "\n")
    os.close(lock)
    for line in last_lines(how, directory):
        say(line)
    return code


def make_run_directory(config: RunConfig) -> Path:
    """A new directory `NAME-TIME-PID` below `logging.directory`: NAME is `logging.name`, else that of the recipe, else
    that of the file or module that holds the recipe. Raises ConfigError."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    where, _, recipe = config.recipe.rpartition(":")
    own = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    name = config.logging.name or own or recipe or "run"
    directory = Path(config.logging.directory).expanduser().resolve() / f"{name}-{stamp}-{os.getpid()}"
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"logging.directory: {directory} cannot be made: {error.strerror}") from error
    return directory


def write_config(directory: Path, config: RunConfig) -> None:
    """Raises StorageError."""
    _write(directory / CONFIG, to_toml(config))


def _write(file: Path, text: str) -> None:
    """At no moment is there half a file, such as a config from which no run could go on. Raises StorageError."""
    draft = file.with_name(f".{file.name}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError as error:  # that of a full disk does not say which file
        raise StorageError(f"{file} cannot be written: {error.strerror}") from error


async def _train(
    config: RunConfig,
    imports: tuple[str, ...],
    directory: Path,
    checkpoint: Checkpoint | None,
    console: Console,
    run_end: RunEnd,
    saved: list[str],
    replay_until: int,
) -> TrainingLoop:
    """Train and save; `saved` is told what. If the trainer's state is lost, go on from the newest checkpoint."""
    display = RunDisplay(steps=config.loop.steps, live=config.logging.progress, console=console)

    def begin(incarnation: int = 0) -> tuple[Ledger, MetricsWriter]:
        ledger = new_ledger(config, incarnation) if checkpoint is None else read_ledger(checkpoint.directory)
        if replay_until:
            ledger.replay(replay_until, config.loop.steps)
        metrics = MetricsWriter(
            directory,
            tensorboard=config.logging.tensorboard,
            wandb_project=config.logging.wandb_project,
            config=dataclasses.asdict(config),
            keep_bytes=ledger.metrics_bytes,
            warn=display.print_line,
        )
        return ledger, metrics

    ledger, metrics = begin()
    try:
        with display:
            async with bring_up(
                config,
                imports=imports,
                log_directory=directory / "logs",
                run_end=run_end,
                on_mesh=display.mesh,
                say=display.print_line,
            ) as meshes:
                system = meshes.system()
                in_vain = 0
                while True:
                    began = ledger.buffer.trainer_version.step
                    writer = RolloutWriter(directory, keep_bytes=ledger.rollouts_bytes, warn=display.print_line)
                    recorder = Recorder(system.rollouts, writer, each=config.logging.rollouts, only=replay_until)
                    checkpoints = Checkpoints(
                        directory, system, metrics=metrics, say=display.print_line, recorder=recorder
                    )

                    def on_start(checkpoint: Checkpoint | None = checkpoint) -> None:
                        write_config(directory, config)  # it may fail, on a full disk
                        begun(directory, checkpoint)

                    loop = TrainingLoop(
                        system,
                        display=display,
                        metrics=metrics,
                        checkpoints=checkpoints if config.checkpoint.keep else None,
                        ledger=ledger,
                        recorder=recorder,
                        restore_from=checkpoint and checkpoint.directory,
                        on_start=on_start,
                    )
                    try:
                        await train_and_save(loop, meshes, _saves(loop, system, directory, saved), display.print_line)
                        metrics.sync()
                        return loop
                    except RollbackNeeded as lost:
                        in_vain = 0 if loop.ledger.buffer.trainer_version.step > began else in_vain + 1
                        if in_vain == MOST_IN_VAIN:
                            raise
                        display.print_line(f"going back to the newest checkpoint: {lost}")
                        metrics.close()
                        await recorder.settled()
                        try:
                            checkpoint = await asyncio.to_thread(
                                Resume(directory).checkpoint, display.print_line, read_ledger
                            )
                        except ConfigError as error:  # no mistake of the config's, as it would be at the start
                            raise CheckpointError(str(error)) from lost
                        again = loop.ledger.buffer.trainer_version.step - (checkpoint.step if checkpoint else 0)
                        display.print_line(
                            f"{counted(again, 'finished step')} {'is' if again == 1 else 'are'} done again"
                        )
                        ledger, metrics = begin(system.trainer.version.incarnation + 1)
    finally:
        metrics.close()


def _saves(loop: TrainingLoop, system: System, directory: Path, saved: list[str]) -> dict[str, Save]:
    """What is saved when the loop has ended; `saved` is told of the weights."""

    async def save_weights() -> str:
        if not loop.has_weights:
            return ""
        weights = directory / "checkpoint"
        saved.append(f"the weights after step {await system.trainer.save(weights)} are in {weights}")
        if not (directory / CONFIG).exists():  # somebody removed the run directory, which is there again
            write_config(directory, system.config)
        return saved[-1]

    saves: dict[str, Save] = {"the weights were": save_weights} if system.config.logging.save_final else {}
    return saves | {"a last checkpoint was": loop.save}


def _conclude(
    config: RunConfig, loop: TrainingLoop, directory: Path, console: Console, started: float
) -> tuple[int, str]:
    """Write and print the summary; returns the exit code and the result. A run that missed its target has failed."""
    summary = loop.summary
    first, last = summary.evaluations[0], summary.evaluations[-1]
    total = time.monotonic() - started
    to_first_step = (loop.records.first_step_at or time.monotonic()) - started
    numbers = {
        "exact_match_before": first.exact_match,
        "exact_match_after": last.exact_match,
        "reward_before": first.reward,
        "reward_after": last.reward,
        "reward_last": summary.reward_last,
        "steps": summary.steps,
        "stopped_early": summary.stopped_early,
        "seconds_total": round(total, 2),
        "seconds_to_first_step": round(to_first_step, 2),
        "tokens_generated": summary.tokens_generated,
        "run_directory": str(directory),
    }
    _write(directory / SUMMARY, json.dumps(numbers, indent=2) + "\n")
    console.print(
        f"\nheld-out exact match {first.exact_match:.3f} → [bold]{last.exact_match:.3f}[/], "
        f"reward {first.reward:.3f} → [bold]{last.reward:.3f}[/] "
        f"({counted(last.prompts, 'prompt')}, greedy{f', {last.failed} more failed' if last.failed else ''})\n"
        f"reward of the last step {summary.reward_last:.3f}\n"
        f"{counted(summary.steps, 'step')}, {summary.tokens_generated:,} tokens sampled, "
        f"{total:.0f} s in all, first optimizer step after {to_first_step:.0f} s\n"
        f"run directory {escape(str(directory))}",
        highlight=False,
        soft_wrap=True,
    )
    target = config.evaluation.target_exact_match
    if last.exact_match < target:
        below = f"exact match {last.exact_match:.3f} is below evaluation.target_exact_match {target}"
        return EXIT_FAILED, f"missed its target: {below}"
    early = f", early: {summary.stopped_early}" if summary.stopped_early else ""
    return EXIT_OK, f"is done after step {summary.steps}{early}"


def _report(run: Path) -> Iterator[str]:
    """Write the report, which cannot change how the run ended; says where it is. A run without numbers has none."""
    if (run / METRICS).is_file():
        try:
            yield f"report: {write_report([run], run / REPORT)}"
        except Exception as error:
            _log.warning("the report could not be written", exc_info=error)
            yield f"the report could not be written: {type(error).__name__}: {one_line(str(error), LONGEST_CAUSE)}"
