"""What must start at once loads neither torch, vLLM nor Monarch (fresh interpreters: about 3 s)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

ROOT = Path(__file__).resolve().parents[2]
TOOL_SUM = "rl_configs/tool_sum.py:ToolSum"
HEAVY = ("torch", "vllm", "monarch", "torchtitan", "transformers")


def modules_of(pattern: str) -> list[str]:
    """Dotted names of the modules whose path below titan_rl/ matches."""
    names = []
    for path in sorted((ROOT / "titan_rl").glob(pattern)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def loaded_after(program: str, *arguments: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `program`, however that ended."""
    script = f"import atexit, json, sys\natexit.register(lambda: print(json.dumps(sorted(sys.modules))))\n{program}"
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return {name.split(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}


def run_module(module: str) -> str:
    """A program that runs `python -m module` with the interpreter's own arguments."""
    return f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def test_importing_the_package_loads_the_standard_library_only():
    assert not loaded_after("import titan_rl") & {*HEAVY, "numpy", "asyncio"}


def test_config_modules_load_nothing_heavy():
    configs = modules_of("**/config.py")
    assert "titan_rl.config" in configs
    assert not loaded_after("\n".join(f"import {name}" for name in configs)) & {*HEAVY, "numpy", "asyncio"}


def test_pure_packages_load_neither_asyncio_nor_an_engine():
    pure = [name for package in ("routing", "scheduling", "planner") for name in modules_of(f"{package}/**/*.py")]
    assert not loaded_after("\n".join(f"import {name}" for name in pure)) & {*HEAVY, "asyncio"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["recipes"], ["train", "--recipe", "copy4", "--dry-run"], ["try", TOOL_SUM]], ids=" ".join
)
def test_the_command_line_loads_nothing_heavy(arguments):
    assert not loaded_after(run_module("titan_rl.cli"), *arguments) & {*HEAVY}


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import titan_rl.generation.engine_loop, titan_rl.generation.engine", {"torch", "vllm", "monarch"}),
        ("import titan_rl.actors.gateway, titan_rl.gateway.app", {"torch", "vllm", "torchtitan", "transformers"}),
        ("import titan_rl.gateway.app", {"monarch"}),
        ("import titan_rl.actors.gateway", {"fastapi", "uvicorn"}),
        (
            "from titan_rl.cli import main; assert main(['serve', '--host', '0.0.0.0', '--recipe', 'copy4']) == 2",
            {"torch", "vllm", "monarch", "fastapi"},
        ),
    ],
)
def test_a_part_loads_nothing_that_it_does_not_use(program, absent):
    assert not loaded_after(program) & absent


def test_the_console_command_names_a_function_that_exists():
    scripts = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["titan-rl"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("package", ["torch", "torchtitan", "transformers", "vllm"])
def test_what_every_process_imports_was_compiled_when_it_was_installed(package: str) -> None:
    """Compiling torch at every start takes two seconds of each process where Python writes no bytecode."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    modules = list(Path(spec.submodule_search_locations[0]).glob("*.py"))
    compiled = [path for path in modules if Path(importlib.util.cache_from_source(str(path))).exists()]
    assert modules and compiled == modules
