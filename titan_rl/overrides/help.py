"""All settings of a config as help text: each with its present value, its type and the docstring of its field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from titan_rl.overrides.settings import describe, fields_of, optional_dataclass

WIDTH = 110


def print_help(config: Any, *, about: str, options: Mapping[str, str]) -> None:
    """Print what a verb takes.

    Args:
        config: whose settings are listed, with their values.
        about: comes first.
        options: the verb's other options, each with a line.
    """
    print(about.strip())
    if options:
        print("\noptions")
        width = max(map(len, options))
        for option, text in options.items():
            print(textwrap.fill(f"  {option.ljust(width)}  {text}", WIDTH, subsequent_indent=" " * (width + 4)))
    print("\nsettings and their values; the command line wins over --config FILE.toml, and that over the recipe")
    told = {option.split()[0] for option in options}
    for line in _settings(config, "", told):
        print(line)


def _settings(config: Any, prefix: str, told: Collection[str] = ()) -> Iterator[str]:
    docs = field_docs(type(config))
    groups = []
    for name, hint in fields_of(config).items():
        value, option = getattr(config, name), f"--{prefix}{name}".replace("_", "-")
        if option in told:
            continue
        kind = optional_dataclass(hint)
        if kind is not None:
            groups.append((name, kind() if value is None else value))
            continue
        if isinstance(value, dict):
            shown = [f"  {option}.{key} {each}" for key, each in value.items()] or [f"  {option}.NAME VALUE"]
            yield from shown
            type_words = ""
        else:
            yield f"  {option} {_words(value)}"
            type_words = f" ({describe(hint)})"
        text = f"{docs.get(name, '')}{type_words}".strip()
        yield from textwrap.wrap(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    for name, group in groups:
        yield f"\n{prefix}{name}".replace("_", "-") + f": {inspect.getdoc(type(group)) or ''}".replace("\n", " ")
        yield from _settings(group, f"{prefix}{name}.")


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(_words, value))
    return str(value) if value != "" else '""'


def field_docs(config: type) -> dict[str, str]:
    """Field → its docstring, the text that follows it in the class. Inherited ones too."""
    docs: dict[str, str] = {}
    for cls in reversed([cls for cls in config.__mro__ if dataclasses.is_dataclass(cls)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, after in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs
