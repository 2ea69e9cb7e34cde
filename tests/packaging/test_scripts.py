"""Scripts and benchmarks, most of which no test runs, import what is there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((REPOSITORY / "scripts").rglob("*.py"))
PLACES = [REPOSITORY / "scripts", REPOSITORY / "scripts" / "bench"]
OPTIONAL = {"trl", "datasets", "brotli"}
"""Installed by the script that needs them."""


def imports(script: Path) -> Iterator[tuple[str, list[str]]]:
    """Modules that a script imports, with the names that it takes from each."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", [alias.name for alias in node.names]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(REPOSITORY)))
def test_what_a_script_imports_is_there(script: Path) -> None:
    for module, names in imports(script):
        local = [place / Path(*module.split(".")) for place in (*PLACES, script.parent)]
        if any(path.with_suffix(".py").exists() or path.is_dir() for path in local):
            continue
        if module.startswith("titan_rl"):
            found = importlib.import_module(module)
            assert not [name for name in names if not hasattr(found, name) and find_spec(f"{module}.{name}") is None]
        elif module.partition(".")[0] not in OPTIONAL:
            assert find_spec(module.partition(".")[0]) is not None, module
