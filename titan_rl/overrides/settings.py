"""Settings of a config: which there are, which one was probably meant, and whether a value has the type of one."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin


def fields_of(config: Any) -> dict[str, Any]:
    """Name → type of the settings of a dataclass instance."""
    hints = typing.get_type_hints(type(config))
    return {field.name: hints[field.name] for field in dataclasses.fields(config) if field.init}


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def optional_dataclass(hint: Any) -> type | None:
    """C, where `hint` is `C` or `C | None` and C a dataclass."""
    return next((kind for kind in members(hint) if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def settings(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings, those of an empty `C | None` and the present keys of dicts included."""
    for name, hint in fields_of(config).items():
        child = getattr(config, name)
        if child is None and (kind := optional_dataclass(hint)) is not None:
            child = kind()
        if dataclasses.is_dataclass(child):
            yield from settings(child, f"{prefix}{name}.")
        elif isinstance(child, dict):
            yield from (f"{prefix}{name}.{key}" for key in child)
        else:
            yield prefix + name


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """` (did you mean X?)` for the nearest known name, or nothing where none is near.

    The last part of a dotted name counts most: who writes `--lr` means `--trainer.optimizer.lr`.

    Args:
        prefix: put in front of the name in the sentence.
    """
    candidates = list(known)
    last_parts: dict[str, str] = {}
    for candidate in candidates:
        last_parts.setdefault(candidate.rpartition(".")[2], candidate)
    nearly_equal = difflib.get_close_matches(name, candidates, n=1, cutoff=0.8)
    same_part = difflib.get_close_matches(name.rpartition(".")[2], last_parts, n=1, cutoff=0.7)
    similar = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    nearest = [*nearly_equal, *(last_parts[part] for part in same_part), *similar]
    return f" (did you mean {prefix}{nearest[0]}?)" if nearest else ""


class WrongType(Exception):
    """A value does not fit; the text says what would."""


def fitting(hint: Any, value: Any) -> Any:
    """`value` as `hint`: an integer passes for a float, a list for a tuple, and nothing else for anything else."""
    if hint is Any:
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (bool, str, types.NoneType) and isinstance(value, hint):
        return value
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(fitting(kind, each) for kind, each in zip(elements(hint, value), value, strict=True))
    for kind in members(hint) if len(members(hint)) > 1 else ():
        try:
            return fitting(kind, value)
        except WrongType:
            continue
    raise WrongType(describe(hint))


def elements(hint: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """The types of the elements of a tuple type that is to hold `values`."""
    kinds = get_args(hint)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return (kinds[0],) * len(values)
    if len(kinds) != len(values):
        raise WrongType(describe(hint))
    return kinds


_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "one text", types.NoneType: "none"}


def describe(hint: Any) -> str:
    """A type in words."""
    if hint in _NAMES:
        return _NAMES[hint]
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if kinds[-1] is Ellipsis:
            return f"any number of values, each {describe(kinds[0])}"
        return f"{len(kinds)} values ({', '.join(map(describe, kinds))})"
    if len(members(hint)) > 1:
        return " or ".join(map(describe, members(hint)))
    return f"a value of type {getattr(hint, '__name__', hint)}"
