"""One run from a config to an exit code: run directory, logs, loop, summary.

Exit codes: 0 done, 1 failed or not learned, 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP. However it ends, the
run directory holds the resolved config, every finished step, the logs and the trainer's newest weights if the trainer
still lives, and nothing of the run is left running.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import os
import time
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from titan_rl.config import RunConfig
from titan_rl.controller.ending import train_and_save
from titan_rl.controller.faults import Announcer, FaultBoard
from titan_rl.controller.loop import TrainingLoop
from titan_rl.controller.records import RunSummary
from titan_rl.errors import ConfigError, Stopped
from titan_rl.launch.session import start
from titan_rl.launch.signals import StopSignals, hold_signals
from titan_rl.observability.logs import log_to_file
from titan_rl.observability.metrics import MetricsWriter
from titan_rl.observability.progress import RunDisplay
from titan_rl.overrides import to_toml

EXIT_OK = 0
EXIT_FAILED = 1

DETERMINISTIC_HINT = (
    "deterministic = true: the run repeats bit for bit; on CPU sampling is 2–6 % slower in float32, 16–37 % in bfloat16"
)
"""As scripts/bench/deterministic.py measures it."""

_log = logging.getLogger(__name__)


def run(config: RunConfig, imports: tuple[str, ...] = ()) -> int:
    """Do the whole run; returns the exit code."""
    hold_signals()
    directory = make_run_directory(config)
    console = Console()
    announce = Announcer(
        functools.partial(_say, console),
        stopping="saving the newest weights, then closing; once more: closing without saving",
    )
    started = time.monotonic()
    try:
        (directory / "config.toml").write_text(to_toml(config), encoding="utf-8")
        log_to_file(directory / "logs" / "controller.log")
        _say(console, f"run directory: {directory}")
        if config.deterministic:
            _say(console, DETERMINISTIC_HINT)
        summary = asyncio.run(_train(config, imports, directory, console, announce))
        return _conclude(config, summary, directory, console, started)
    except Stopped as stop:
        _say(console, f"stopped by the user with {stop}; run directory: {directory}")
        return stop.exit_code
    except Exception as error:
        announce(error)
        _log.error("the run failed", exc_info=error)
        _say(console, f"logs: {directory / 'logs'}")
        return EXIT_FAILED


def make_run_directory(config: RunConfig) -> Path:
    """A new directory `NAME-TIME-PID` below `logging.directory`: NAME is `logging.name`, else that of the recipe, else
    that of the file or module that holds the recipe.

    Raises:
        ConfigError: it cannot be made.
    """
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


async def _train(
    config: RunConfig,
    imports: tuple[str, ...],
    directory: Path,
    console: Console,
    announce: Announcer,
) -> RunSummary:
    faults = FaultBoard(announce)
    StopSignals(faults.report)
    display = RunDisplay(steps=config.loop.steps, live=config.logging.progress, console=console)
    metrics = MetricsWriter(
        directory,
        tensorboard=config.logging.tensorboard,
        wandb_project=config.logging.wandb_project,
        run_name=directory.name,
        config=dataclasses.asdict(config),
        say=display.say,
    )
    try:
        with display:
            async with start(
                config,
                imports=imports,
                log_directory=directory / "logs",
                faults=faults,
                on_mesh=display.mesh,
                on_stop=display.say,
            ) as system:
                loop = TrainingLoop(system, display=display, metrics=metrics)
                checkpoint = directory / "checkpoint" if config.logging.save_final else None
                await train_and_save(loop, system.trainer, faults, checkpoint, display.say)
                return loop.summary
    finally:
        metrics.close()


def _conclude(config: RunConfig, summary: RunSummary, directory: Path, console: Console, started: float) -> int:
    """Write and print the summary; a run that missed its target has failed."""
    first, last = summary.evaluations[0], summary.evaluations[-1]
    total = time.monotonic() - started
    to_first_step = (summary.first_step_at or time.monotonic()) - started
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
    (directory / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    console.print(
        f"\nheld-out exact match {first.exact_match:.3f} → [bold]{last.exact_match:.3f}[/], "
        f"reward {first.reward:.3f} → [bold]{last.reward:.3f}[/] "
        f"({last.prompts} prompts, greedy{f', {last.failed} more failed' if last.failed else ''})\n"
        f"reward of the last step {summary.reward_last:.3f}\n"
        f"{summary.steps} steps, {summary.tokens_generated:,} tokens sampled, "
        f"{total:.0f} s in all, first optimizer step after {to_first_step:.0f} s\n"
        f"run directory {escape(str(directory))}",
        highlight=False,
        soft_wrap=True,
    )
    target = config.evaluation.target_exact_match
    if last.exact_match < target:
        console.print(
            f"[bold red]the policy did not learn[/]: exact match {last.exact_match:.3f} is below "
            f"evaluation.target_exact_match {target}",
            highlight=False,
            soft_wrap=True,
        )
        return EXIT_FAILED
    return EXIT_OK


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
