"""Values of settings: what fits the type of a field, what it is called in words, and what a word of the command line
means."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import tomli

from titan_rl.errors import ConfigError


def fields_of(config: Any) -> dict[str, Any]:
    """Name → type of the settings of a dataclass."""
    hints = typing.get_type_hints(config, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(config) if each.init}


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def group_in(hint: Any) -> type | None:
    """C, where `hint` is `C` or `C | None` and C a dataclass."""
    return next((kind for kind in members(hint) if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "one text", types.NoneType: "none"}


def describe(hint: Any) -> str:
    """A type in words, with its bounds."""
    if hint in _NAMES:
        return _NAMES[hint]
    if get_origin(hint) is Annotated:
        kind, meta = get_args(hint)
        bounds = {"at least": meta.ge, "more than": meta.gt, "at most": meta.le}
        limits = " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)
        return f"{describe(kind)} of {limits}"
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


def convert_value(hint: Any, value: Any, name: str, *, words: bool = False) -> Any:
    """`value` as `hint`: an integer passes for a float, a list for a tuple, and nothing else for anything else.

    Args:
        name: of the setting, for the error.
        words: `value` is the list of words that followed an option, whose texts are read as numbers and the like.

    Raises:
        ConfigError: wrong type, out of bounds, or not finite.
    """
    given = value
    if words:
        given = " ".join(value)
        if types.NoneType in members(hint) and given.lower() == "none":
            return None
        if hint is bool and not value:
            return True  # `--logging.tensorboard` alone
        if get_origin(hint) is not tuple:
            value = value[0] if len(value) == 1 else value
    for attempt in (value, _python_numbers(value)) if words else (value,):
        try:
            fits = msgspec.convert(attempt, hint, strict=not words)
        except msgspec.ValidationError:
            continue
        if all(math.isfinite(each) for each in (fits if isinstance(fits, tuple) else [fits]) if type(each) is float):
            return fits
    got = "nothing" if given == "" else repr(given)
    raise ConfigError(f"{name}: expected {describe(hint)}, got {got}")


def _python_numbers(words: Any) -> Any:
    """`.5`, `+3` and `1_000` are numbers of Python's; msgspec knows those of JSON."""
    if isinstance(words, list):
        return [_python_numbers(word) for word in words]
    for kind in (int, float):
        try:
            return kind(words)
        except ValueError:
            continue
    return words


def check(config: Any, prefix: str = "") -> None:
    """Hold a config that was made in Python to the types and bounds of its fields.

    Args:
        prefix: comes before the names of its settings.

    Raises:
        ConfigError: naming the first setting that does not fit.
    """
    for name, hint in fields_of(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            check(value, f"{prefix}{name}.")
        else:
            convert_value(hint, value, prefix + name)


def parse_words(words: list[str], like: Any = None) -> Any:
    """Words as the value of a setting without a declared type, such as a constructor argument.

    Each word is the TOML value it reads as (`3`, `0.5`, `true`, `[1, 2]`, `"3"`), else the text itself. No word means
    true, as for a switch.

    Args:
        like: the value to be replaced; a text is replaced by a text.
    """
    if not words:
        return True
    values = [word if isinstance(like, str) else _guess_word(word) for word in words]
    return values[0] if len(values) == 1 else values


def _guess_word(word: str) -> Any:
    try:
        value = tomli.loads(f"value = {word}")["value"]
    except tomli.TOMLDecodeError:
        return {"True": True, "False": False}.get(word, word)
    return value if isinstance(value, bool | int | float | str | list | dict) else word  # not a date
