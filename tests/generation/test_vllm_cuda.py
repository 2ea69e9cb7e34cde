"""How engines step on CUDA. Contracts are held against vLLM's sources for CUDA, which every build of it has; and its
model runner V2 runs here on a CPU, with its own kernels interpreted, in one process of about 60 s.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rank_processes import run_on_ranks
from vllm import EngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.config.vllm import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.request import Request

from titan_rl.config import PlacementConfig, RunConfig
from titan_rl.generation import vllm as ours
from titan_rl.generation.config import GeneratorConfig, generator_environment
from titan_rl.generation.vllm.engine import engine_arguments
from titan_rl.hosts.facts import HostFacts
from titan_rl.supervision.placement import plan
from titan_rl.supervision.provisioner import _command

VLLM = Path(sys.modules["vllm"].__path__[0])


def tree_of(*path: str) -> ast.Module:
    return ast.parse((VLLM.joinpath(*path)).read_text())


def assigned(tree: ast.AST) -> set[str]:
    """Attributes and methods that instances of a class in it have."""
    stores = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    fields = {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")}
    return stores | fields | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def read_of(function: Any, *path: str) -> Iterator[str]:
    """Attributes that are read of `self.PATH` in a class of ours."""
    prefix = ".".join(("self", *path)) + "."
    for found in re.findall(rf"{re.escape(prefix)}(\w+)", inspect.getsource(function)):
        yield found


@pytest.mark.parametrize("ranks", [2, 4])
def test_vllms_all_reduce_finds_the_device_of_every_rank_from_every_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """With one visible device per rank it fails: vLLM maps the ranks of the others too."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("kernels, which only builds for CUDA have"))
    cuda = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    config = RunConfig(generator=GeneratorConfig(tensor_parallel=ranks), placement=PlacementConfig(device="cuda"))
    placement = plan(config, HostFacts(cpus=8, cuda_devices=tuple(range(3, 4 + 2 * ranks))))
    host: Any = SimpleNamespace(logs="", scratch=Path("/scratch"), owner=1, name="host0", python="python")
    for mesh in (placement.mesh("generator0"), placement.mesh("generator1")):
        for rank in range(ranks):
            environment = _command(mesh, "", host, 0, ranks, SimpleNamespace(rank=rank)).env
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(environment["CUDA_VISIBLE_DEVICES"]))
            assert environment["LOCAL_RANK"] == str(rank)
            assert tuple(map(cuda.device_id_to_physical_device_id, range(ranks))) == mesh.devices
            assert [*map(cuda.logical_device_id_to_visible_device_id, range(ranks))] == [*range(ranks)]
    trainer = _command(placement.mesh("trainer"), "", host, 0, 1, SimpleNamespace(rank=0)).env
    assert (trainer["CUDA_VISIBLE_DEVICES"], trainer["LOCAL_RANK"]) == ("3", "0")
