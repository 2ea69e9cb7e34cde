"""Runs a function on every rank of a small generator, forked from a process that has imported vLLM, as a run's are."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from support.ranks import Imports, Scenario, run_scenarios

from titan_rl.generation.config import generator_environment
from titan_rl.processes import OWNER

MODULES = (
    "titan_rl.generation.vllm.engine",
    "titan_rl.generation.vllm.adaptation",
    "titan_rl.generation.vllm.steps",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.worker.cpu_worker",
)


def run_on_ranks(
    function: str, ranks: int, *, deterministic: bool = False, modules: tuple[str, ...] = MODULES, **arguments: Any
) -> list[Any]:
    """What `function(**arguments)` returned on each rank, in the environment of a (deterministic) generator. `modules`
    are imported before ranks are forked."""
    variables = generator_environment("cpu", deterministic=deterministic) | {OWNER: str(os.getpid())}
    scenario = Scenario(call, ranks, {"function": function, "arguments": arguments})
    with tempfile.TemporaryDirectory() as scratch:
        (found,) = run_scenarios([scenario], Path(scratch), Imports(modules, tuple(variables.items())))
    return found


def call(function: str, arguments: dict[str, Any]) -> Any:
    """On a rank."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)
