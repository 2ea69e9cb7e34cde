"""A training run that kills itself with SIGKILL at a named point. Its processes die with it.

    python killed_run.py POINT TURN ARGUMENTS-OF-TRAIN...

A point is a function of the controller, before, while or after it runs for the TURN-th time. With the variable
SIGNALS="SIGTERM SIGINT" it prints `signalled` and sends itself these, one after the other.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_rl.processes import run_and_exit

BETWEEN_SIGNALS = 0.3
"""Seconds; two that come at once are one."""

POINTS: dict[str, tuple[str, str, float | None]] = {
    "after an admission": ("titan_rl.scheduling.group_buffer:GroupBuffer.admit", "after", None),
    "mid-generation": ("titan_rl.actors.rollouts:RolloutWorkers.run_group", "while", 0.05),
    "after a finish": ("titan_rl.scheduling.group_buffer:GroupBuffer.finish", "after", None),
    "after a decision": ("titan_rl.scheduling.group_buffer:GroupBuffer.decide", "after", None),
    "mid-batch": ("titan_rl.scheduling.group_buffer:GroupBuffer.take", "after", None),
    "mid-step": ("titan_rl.actors.trainer_client:TrainerClient.train_step", "while", 0.03),
    "after a step": ("titan_rl.scheduling.group_buffer:GroupBuffer.trained", "after", None),
    "before a release": ("titan_rl.actors.rollouts:RolloutWorkers.release", "before", None),
    "before the numbers": ("titan_rl.metrics.writer:MetricsWriter.write", "before", None),
    "after the numbers": ("titan_rl.metrics.writer:MetricsWriter.write", "after", None),
    "mid-publication": ("titan_rl.actors.trainer_client:TrainerClient.push_model_state_dict", "while", 0.003),
    "mid-pull": ("titan_rl.actors.router_client:RouterClient.pull_model_state_dict", "while", 0.02),
    "mid-evaluation": ("titan_rl.actors.rollouts:RolloutWorkers.run_groups", "while", 0.03),
    "before a cut": ("titan_rl.loop.checkpoint_files:new_draft", "before", None),
    "mid-cut": ("titan_rl.actors.trainer_client:TrainerClient.begin_checkpoint", "while", 0.01),
    "mid-checkpoint": ("titan_rl.actors.trainer_client:TrainerClient.finish_checkpoint", "while", 0.01),
    "before the manifest": ("titan_rl.loop.checkpoint_files:commit", "before", None),
    "before the rename": ("os:rename", "before", None),
    "between rename and sync": ("os:rename", "after", None),
    "before older ones are removed": ("titan_rl.loop.checkpoint_files:prune", "before", None),
    "after a checkpoint": ("titan_rl.loop.checkpoint_files:prune", "after", None),
}
"""Name → (function, when, seconds into it)."""

PHASES: dict[str, tuple[str, str, float | None]] = {
    "config check": ("titan_rl.run.task_check:check_task", "before", None),
    "spawn": ("titan_rl.supervision.supervisor:Supervisor.spawn", "before", None),
    "mid-spawn": ("titan_rl.supervision.supervisor:Supervisor.spawn", "after", None),
    "set-up": ("titan_rl.supervision.supervisor:Supervisor.set_up", "while", 2.0),
    "warm-up": ("titan_rl.actors.trainer_client:TrainerClient.warm_up_step", "while", 0.01),
    "first pull": ("titan_rl.actors.router_client:RouterClient.pull_model_state_dict", "while", 0.01),
    "final save": ("titan_rl.actors.trainer_client:TrainerClient.save", "while", 0.005),
    "closing": ("titan_rl.supervision.supervisor:Supervisor.close", "while", 0.01),
    "restore": ("titan_rl.actors.trainer_client:TrainerClient.restore", "while", 0.01),
}
"""Of a run that is stopped by a signal, besides some of `POINTS`."""


RENAME = os.rename
"""Of which only those of checkpoints count."""


@functools.cache
def _die() -> None:
    """Once."""
    if not (names := os.environ.get("SIGNALS", "").split()):
        os.kill(os.getpid(), signal.SIGKILL)

    def send() -> None:
        for name in names:
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(BETWEEN_SIGNALS)

    print("signalled", flush=True)
    threading.Thread(target=send, daemon=True).start()


def _deadly(function: Callable[..., Any], when: str, seconds: float | None, turn: int) -> Callable[..., Any]:
    calls = 0

    def is_the_one(*args: Any) -> bool:
        nonlocal calls
        calls += function is not RENAME or Path(args[0]).name.startswith(".step-")
        return calls == turn

    if asyncio.iscoroutinefunction(function):

        @functools.wraps(function)
        async def deadly(*args: Any, **kwargs: Any) -> Any:
            if mine := is_the_one(*args):
                if when == "before":
                    _die()
                if when == "while":
                    asyncio.get_running_loop().call_later(seconds, _die)
            result = await function(*args, **kwargs)
            if mine:
                _die()  # also where it was over sooner
            return result

        return deadly

    @functools.wraps(function)
    def deadly_too(*args: Any, **kwargs: Any) -> Any:
        if (mine := is_the_one(*args)) and when == "before":
            _die()
        result = function(*args, **kwargs)
        if mine:
            _die()
        return result

    return deadly_too


def owner_of(target: str) -> tuple[Any, str]:
    """The class or module of a function, and the function's name there."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def main(point: str, turn: int, arguments: list[str]) -> int:
    target, when, seconds = (POINTS | PHASES)[point]
    owner, name = owner_of(target)
    deadly = _deadly(getattr(owner, name), when, seconds, turn)
    setattr(owner, name, deadly)
    for module in list(sys.modules.values()):  # those that have imported it by name
        ours = getattr(module, "__name__", "").startswith("titan_rl")
        if ours and not isinstance(owner, type) and name in vars(module):
            setattr(module, name, deadly)
    from titan_rl.train import main as train

    return train(arguments)


if __name__ == "__main__":
    run_and_exit(functools.partial(main, sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
