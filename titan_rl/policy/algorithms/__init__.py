"""Algorithms, one per file; `base` says what one is."""

import ast
from pathlib import Path


def catalogue(function: str = "") -> dict[str, str]:
    """What the files beside this one say about themselves, by name; those that define `function`, which `loss` and
    `advantages` are. None is imported."""
    texts = {file.stem: file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))}
    return {
        name: ast.get_docstring(ast.parse(text)) or ""
        for name, text in texts.items()
        if name not in ("__init__", "base") and (f"\ndef {function}(" in text or not function)
    }


def short_names(function: str) -> dict[str, str]:
    """Name of each algorithm that defines `function` → where it is."""
    return {name: f"{__name__}.{name}:{function}" for name in catalogue(function)}
