"""One run, or one service, from a config to an exit code: run directory, logs, signals, work, final messages.

A run that goes on (`resume`) does so in its own directory.

However a run ends, its directory holds the resolved config, every finished step and the
logs, and also the trainer's newest weights if the trainer still lives. No process of the run is left. Its last two
lines say what ended it, what was saved and how to go on, and where its report is.
"""

import asyncio
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from titan_rl.config import RunConfig, ServeConfig
from titan_rl.directories import ENDING, METRICS, SUMMARY, lock_run, write_ending, write_file
from titan_rl.errors import ConfigError, Stopped
from titan_rl.loop.ledger import read_ledger
from titan_rl.loop.loop import TrainingLoop
from titan_rl.metrics.timeline import SPANS, timeline
from titan_rl.metrics.waits import answer_signals
from titan_rl.one_line import counted, one_line
from titan_rl.overrides import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from titan_rl.run.runs import Resume, how_to_go_on, write_config
from titan_rl.run.start import Serving, bring_up
from titan_rl.run.training import NOTHING_SAVED, Training
from titan_rl.supervision.process import hold_signals, lasting_output, log_to_file, report_stop_signals
from titan_rl.supervision.run_end import Options, RunEnd, announcer
from titan_rl.view.learning import Kind
from titan_rl.view.report import REPORT, write_report
from titan_rl.weights.segment_files import remove_segments_of

LONGEST_CAUSE = 400
"""Characters of an error in the line that says what ended the run. The logs have all of it."""

_log = logging.getLogger(__name__)


@lasting_output()
def run(config: RunConfig, resume: Resume | None = None, *, replay_until: int = 0) -> int:
    """Do the whole run, or the rest of one; returns the exit code. `replay_until`: do again what was done, and end
    after this step; 0: go on. Raises ConfigError: none of its checkpoints can be read. Nothing of it was changed."""
    started = time.monotonic()
    console = Console()
    training: Training | None = None

    async def work(directory: Path, run_end: RunEnd) -> tuple[int, str]:
        nonlocal training
        say(f"run directory: {directory}")
        if config.logging.spans:
            timeline.begin(directory / SPANS, "controller")
            timeline.follow(lambda: "the meshes")
        if resume is None:
            write_config(directory, config)
        elif checkpoint is None:
            say("there is no checkpoint yet: the run starts over")
        training = Training(config, directory, checkpoint, console, replay_until=replay_until)
        loop = await training.run(run_end)
        if replay_until:
            return EXIT_OK, f"has played step {replay_until}"
        ended = _conclude(config, loop, directory, console, started)
        await training.look(Kind.PROBLEM, Kind.WARNING)  # of the whole run, as its report has them
        return ended

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    checkpoint = None if resume is None else resume.checkpoint(say, read_ledger)
    stopping = "saving the newest weights, then closing; once more: closing without saving"
    code, how, directory = conduct(config, work, say=say, stopping=stopping, directory=resume.run if resume else None)
    if replay_until:
        say(f"the replay {how}")
        return code
    say(f"the run {how}; {training.saved if training else NOTHING_SAVED}; {how_to_go_on(directory)}")
    _report(directory, say)
    return code


def run_service(config: ServeConfig) -> int:
    """Serve until a signal; returns the exit code."""
    say = partial(print, flush=True)

    async def work(directory: Path, options: Options) -> tuple[int, str]:
        async with bring_up(config, **options) as up:
            key = "with the API key" if config.gateway.api_key else "without an API key"
            say(f"serving {config.gateway.model} at {up.gateway.url}/v1, {key}; Ctrl-C stops it")
            await asyncio.Event().wait()
        return EXIT_OK, "is over"

    code = run_serving("serve", config, work, say)
    return EXIT_OK if code > 128 else code


@lasting_output()
def run_serving(verb: str, config: RunConfig, work: Serving, say: Callable[[str], None]) -> int:
    """Do work that serves weights, in a directory of its own with logs, until it ends or a signal comes; returns the
    exit code."""

    async def watched(directory: Path, run_end: RunEnd) -> tuple[int, str]:
        options: Options = {
            "run_end": run_end,
            "log_directory": directory / "logs",
            "on_mesh": lambda mesh, doing: say(f"{mesh}: {doing or 'has left'}"),
            "say": say,
        }
        return await run_end.watch(work(directory, options))

    code, how, directory = conduct(dataclasses.replace(config, recipe=verb), watched, say=say, stopping="closing")
    say(f"{verb} {how}; logs: {directory / 'logs'}")
    return code


def conduct(
    config: RunConfig,
    work: Callable[[Path, RunEnd], Coroutine[Any, Any, tuple[int, str]]],
    *,
    say: Callable[[str], None],
    stopping: str,
    directory: Path | None = None,
) -> tuple[int, str, Path]:
    """Do the work in a run directory, a new one where none is given; returns the exit code, how it ended in words, and
    the directory. `work`: called with that and with what collects faults and signals; returns the first two.
    `stopping`: says what happens after a stop signal."""
    hold_signals()
    remove_segments_of(os.getpid())  # of a dead run with this process id: a container that started again has the same
    directory = directory or make_run_directory(config)
    lock = lock_run(directory)
    announce = announcer(say, stopping=stopping)

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
    if not ((directory / SUMMARY).exists() and (directory / ENDING).exists()):  # else it was over, and has not gone on
        write_ending(directory, code, how)
    os.close(lock)
    return code, how, directory


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
    write_file(directory / SUMMARY, json.dumps(numbers, indent=2) + "\n")
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


def _report(run: Path, say: Callable[[str], None]) -> None:
    """Write the report, which cannot change how the run ended; says where it is. A run without numbers has none."""
    if (run / METRICS).is_file():
        try:
            say(f"report: {write_report([run], run / REPORT)}")
        except Exception as error:
            _log.warning("the report could not be written", exc_info=error)
            say(f"the report could not be written: {type(error).__name__}: {one_line(str(error), LONGEST_CAUSE)}")
