"""Overrides from the words of a command line and from TOML files, and configs written as TOML."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli

from titan_rl.errors import ConfigError
from titan_rl.overrides.settings import Override, WrongType, describe, elements, fitting, members

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def split_options(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """`["--a.b", "1", "2", "--c=3"]` → `[("--a.b", ["1", "2"]), ("--c", ["3"])]`.

    A word that starts with one dash is a value (`-1`); a value that starts with two is written `--key=--value`.

    Raises:
        ConfigError: a word before the first option.
    """
    options: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            options.append((name, [value] if equals else []))
        elif options:
            options[-1][1].append(argument)
        else:
            raise ConfigError(f"{argument!r} belongs to no option: settings are given as --section.key VALUE")
    return options


def option_overrides(options: Iterable[tuple[str, str, list[str]]], base: Path) -> list[Override]:
    """One override for every `(option as it was written, setting, words)`; `-` and `_` are the same in a name."""
    return [
        Override(
            path=tuple(setting.replace("-", "_").split(".")),
            value=words,
            origin=option,
            base=base,
            convert=from_words,
            guess=guess_value,
        )
        for option, setting, words in options
    ]


def from_words(hint: Any, words: list[str]) -> Any:
    """Words as a value of type `hint`; raises WrongType."""
    if get_origin(hint) is tuple:
        return tuple(from_words(kind, [word]) for kind, word in zip(elements(hint, words), words, strict=True))
    if hint is bool and not words:
        return True  # `--logging.tensorboard` alone
    if types.NoneType in members(hint) and [word.lower() for word in words] == ["none"]:
        return None
    if len(words) != 1:
        raise WrongType(describe(hint))
    return fitting(hint, _read_word(hint, words[0]))


def _read_word(hint: Any, word: str) -> Any:
    """One word as a value of type `hint` where it reads as one, else the word itself, for `fitting` to refuse."""
    kinds = [kind for kind in members(hint) if kind is not types.NoneType]
    if len(kinds) != 1:
        return guess_value([word])
    if kinds[0] is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    if get_origin(kinds[0]) is Literal:
        return next((choice for choice in get_args(kinds[0]) if str(choice) == word), word)
    if kinds[0] in (int, float):
        try:
            return kinds[0](word)
        except ValueError:
            return word
    return word


def guess_value(words: list[str], like: Any = None) -> Any:
    """Words as the value of a setting without a declared type, such as a constructor argument.

    Each word is the TOML value it reads as (`3`, `0.5`, `true`, `[1, 2]`, `"3"`), else the text itself. No word means
    true, as for a switch.

    Args:
        like: the value to be replaced; a text is replaced by a text.
    """
    if not words:
        return True
    values = [_guess_word(word, like) for word in words]
    return values[0] if len(values) == 1 else values


def _guess_word(word: str, like: Any) -> Any:
    if isinstance(like, str):
        return word
    try:
        value = tomli.loads(f"value = {word}")["value"]
    except tomli.TOMLDecodeError:
        return {"True": True, "False": False}.get(word, word)
    return value if isinstance(value, bool | int | float | str | list | dict) else word  # not a date


def read_toml(file: Path) -> dict[str, Any]:
    """The content of a TOML file; raises ConfigError where there is none."""
    try:
        return tomli.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{file}: is not valid TOML: {error}") from None


def toml_overrides(table: Mapping[str, Any], file: Path) -> list[Override]:
    """One override for every value in `table`, the content of `file`. An empty table is a value too: it empties a
    dict."""

    def walk(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Override]:
        for name, value in table.items():
            if isinstance(value, dict) and value:
                yield from walk(value, (*path, name))
            else:
                yield Override(
                    path=(*path, name),
                    value=value,
                    origin=f"{file.name}: {'.'.join((*path, name))}",
                    base=file.resolve().parent,
                    convert=fitting,
                    guess=lambda value, before: value,
                )

    return list(walk(table, ()))


def to_toml(config: Any) -> str:
    """The config as TOML that `--config` takes. A setting that is None is left out: TOML has no such value."""
    return "\n".join(_lines(_as_table(config), ())).strip() + "\n"


def _as_table(config: Any) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    return {
        name: _as_table(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
        if value is not None
    }


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {name: value for name, value in table.items() if not isinstance(value, dict)}
    if path and (plain or not table):
        yield ""
        yield f"[{'.'.join(map(_key, path))}]"
    yield from (f"{_key(name)} = {_value(value)}" for name, value in plain.items())
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _lines(value, (*path, name))


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    # a JSON string is a basic string of TOML, but for DEL, which TOML wants escaped
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_value(each)}" for name, each in value.items()) + "}"
    raise ConfigError(f"{value!r} cannot be written as TOML")
