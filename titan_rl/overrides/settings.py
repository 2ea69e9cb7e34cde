"""Layers of overrides over a config, the values that they may give, and the config as TOML.

Layers are laid over the config's plain data, tables in tables. msgspec then makes a config of it, which runs every
`__post_init__` once, with the final values.
"""

import contextlib
import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import tomli
import tomli_w

from titan_rl.errors import ConfigError

T = TypeVar("T")
Table = dict[str, Any]


# --- names -----------------------------------------------------------------------------------------------------------


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of nested plain data by their dotted names; those of the n-th table in a list as `list.n.name`."""
    for name, value in table.items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, Mapping) for each in value):
            value = {str(number): each for number, each in enumerate(value)}
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest known name, or nothing where none is near.

    The last part of a dotted name counts most: who writes `--lr` means `--trainer.optimizer.lr`.
    """
    candidates = list(known)
    last_parts = {candidate.rpartition(".")[2]: candidate for candidate in reversed(candidates)}
    nearly_equal = difflib.get_close_matches(name, candidates, n=1, cutoff=0.8)
    same_part = difflib.get_close_matches(name.rpartition(".")[2], last_parts, n=1, cutoff=0.7)
    similar = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    nearest = [*nearly_equal, *(last_parts[part] for part in same_part), *similar]
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _names(kind: type, table: Table, prefix: str = "") -> Iterator[str]:
    """All settings of a config of this type, those of an empty `C | None` and the present keys of dicts included."""
    for name, hint in fields_of(kind).items():
        child = table.get(name)
        if (group := group_in(hint)) is not None:
            yield from _names(group, child or {}, f"{prefix}{name}.")
        elif isinstance(child, dict):
            yield from (f"{prefix}{name}.{key}" for key in child)
        else:
            yield prefix + name


# --- values ----------------------------------------------------------------------------------------------------------


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
    """`value` as `hint`: an integer passes for a float, a list for a tuple, and nothing else for anything else. Raises
    ConfigError: wrong type, out of bounds, or not finite. `words`: `value` is the list of words that followed an
    option, whose texts are read as numbers and the like."""
    given = value
    if not words:
        with contextlib.suppress(ConfigError):  # then it is no such value either
            value = _plain(value, name)
    else:
        given = " ".join(value)
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
    """Hold a config that was made in Python to the types and bounds of its fields. Raises ConfigError: naming the first
    setting that does not fit, with `prefix` in front."""
    for name, hint in fields_of(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            check(value, f"{prefix}{name}.")
        else:
            convert_value(hint, value, prefix + name)


def parse_words(words: list[str], like: Any = None) -> Any:
    """Words as the value of a setting without a declared type, such as a constructor argument.

    Each word is the TOML value it reads as (`3`, `0.5`, `true`, `[1, 2]`, `"3"`), else the text itself. No word means
    true, as for a switch. `like`: the value to be replaced; a text is replaced by a text.
    """

    def value_of(word: str) -> Any:
        if isinstance(like, str):
            return word
        try:
            value = tomli.loads(f"value = {word}")["value"]
        except tomli.TOMLDecodeError:
            return {"True": True, "False": False}.get(word, word)
        return word if isinstance(value, date | time) else value

    values = [value_of(word) for word in words]
    return values[0] if len(values) == 1 else values or True


# --- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One setting and the value that somebody gave it."""

    path: tuple[str, ...]
    value: Any
    """A value of TOML, or the words that followed an option."""
    origin: str
    """How its author wrote the setting: `--loop.steps` or `smoke.toml: loop.steps`."""
    base: Path
    """Relative file names in `value` start here."""
    words: bool = False

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What else happens when a setting is set. Settings are dotted names."""

    alternatives: tuple[tuple[str, str], ...] = ()
    """Pairs of settings of which one excludes the other: a layer that sets one of them empties the other, unless it
    sets both."""
    arguments_of: Mapping[str, str] = field(default_factory=dict)
    """Setting that names a class or function → dict of its arguments: another one starts without arguments."""
    kept: Collection[str] = ()
    """Arguments that all of them take and keep."""
    file_settings: Mapping[str, Callable[[str, Path], str]] = field(default_factory=dict)
    """Setting that may hold a file name → makes that absolute, given the directory to start from."""


def apply(config: T, layers: Iterable[Sequence[Override]], rules: Rules | None = None, base: Path | None = None) -> T:
    """A new config with the layers applied in order. `base`: relative file names in `config` itself start here; None:
    they stay as they are. Raises ConfigError: unknown setting, wrong type, or values that do not fit together."""
    rules = rules or Rules()
    table = _as_table(config)
    for key, absolute in rules.file_settings.items():
        owner, name = _owner(table, key)
        if base is not None and isinstance(value := owner.get(name), str):
            owner[name] = absolute(value, base)
    for layer in layers:
        _apply_layer(type(config), table, layer, rules)
    try:
        return msgspec.convert(table, type(config))
    except msgspec.ValidationError as error:  # `config` itself did not fit its types
        raise ConfigError(str(error)) from error


def variant(config: T, settings: Mapping[str, Any]) -> T:
    """A config that differs in these settings, `{"loop.steps": 3}`. Raises ConfigError as `apply` does."""
    base = Path.cwd()
    return apply(
        config, [[Override(path=tuple(key.split(".")), value=settings[key], origin=key, base=base) for key in settings]]
    )


def _owner(table: Table, key: str) -> tuple[Table, str]:
    """The table that holds a setting, and its name there; an empty one where there is none."""
    *owners, name = key.split(".")
    for owner in owners:
        table = table.get(owner) or {}
    return table, name


def _apply_layer(kind: type, table: Table, layer: Sequence[Override], rules: Rules) -> None:
    set_here = {".".join(each.path[:length]) for each in layer for length in range(1, len(each.path) + 1)}
    # the name of a class before its arguments, wherever in the layer it stands: the name empties them
    for override in sorted(layer, key=lambda each: each.key not in rules.arguments_of):
        before = None
        if arguments := rules.arguments_of.get(override.key):
            owner, name = _owner(table, override.key)
            before = owner.get(name)
        value = _set(kind, table, override, rules)
        if arguments and value != before:
            owner, name = _owner(table, arguments)
            owner[name] = {kept: given for kept, given in owner[name].items() if kept in rules.kept}
        for pair in rules.alternatives:
            for chosen, other in (pair, pair[::-1]):
                chooses = override.key == chosen and value not in ("", None)
                if (chooses or override.key.startswith(f"{chosen}.")) and other not in set_here:
                    owner, name = _owner(table, other)
                    owner[name] = "" if isinstance(owner[name], str) else None


def _set(kind: type, table: Table, override: Override, rules: Rules) -> Any:
    """Set one value in the plain data of a config; returns it with its type."""
    hint: Any = kind
    owner: Any = table
    for depth, name in enumerate(override.path):
        if (group := group_in(hint)) is not None:
            if name not in fields_of(group):
                meant = did_you_mean(override.key, _names(kind, table))
                if override.words:
                    meant = meant.replace("did you mean ", "did you mean --").replace("_", "-")
                raise ConfigError(f"{override.origin}: there is no such setting{meant}")
            hint = fields_of(group)[name]
        elif get_origin(hint) is dict:
            hint = get_args(hint)[1]
        elif hint is not Any or not isinstance(owner, dict):
            raise ConfigError(f"{override.origin}: {'.'.join(override.path[:depth])} has no settings below it")
        if depth < len(override.path) - 1:
            if owner.get(name) is None:
                owner[name] = {}
            owner = owner[name]
    if override.value == {} and group_in(hint) is not None:  # an empty table of TOML: the group with what it has
        owner[name] = owner.get(name) or {}
        return owner[name]
    value = _plain(_value(hint, override, owner.get(name)), override.origin)  # a copy: later layers may change it
    if isinstance(value, str) and override.key in rules.file_settings:
        value = rules.file_settings[override.key](value, override.base)
    owner[name] = value
    return value


def _value(hint: Any, override: Override, before: Any) -> Any:
    if override.words and " ".join(override.value).lower() == "none" and types.NoneType in members(hint):
        return None
    if group_in(hint) is not None or get_origin(hint) is dict:
        if not isinstance(override.value, dict):
            raise ConfigError(f"{override.origin}: is a group of settings, set {override.key}.NAME")
        return override.value
    if hint is Any:
        return parse_words(override.value, before) if override.words else override.value
    return convert_value(hint, override.value, override.origin, words=override.words)


# --- plain data ------------------------------------------------------------------------------------------------------


def to_toml(config: Any) -> str:
    """The config as TOML that `--config` takes. A setting that is None is left out: TOML has no such value. Raises
    ConfigError: naming a constructor argument that TOML has no word for."""

    def without_none(table: Table) -> Table:
        return {
            name: without_none(value) if isinstance(value, dict) else value
            for name, value in table.items()
            if value is not None
        }

    return tomli_w.dumps(without_none(_as_table(config)))


def _as_table(config: Any, prefix: str = "") -> Table:
    """A copy of the config as plain data. Raises ConfigError, see `_plain`."""
    return {
        name: _as_table(value, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else _plain(value, prefix + name)
        for name in fields_of(type(config))
        for value in [getattr(config, name)]
    }


def _plain(value: Any, name: str, *, inside: bool = False) -> Any:
    """A copy of a value of TOML, or None. A tuple becomes a list, and a path its name, as TOML would give them back.
    Raises ConfigError: TOML has no word for it, or it is nan, which is never the value that it was before. `inside`: it
    is in a table or a list, where TOML has no None."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(each, f"{name}.{key}", inside=True) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, f"{name}.{number}", inside=True) for number, each in enumerate(value)]
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, (bool, date, time)) or (value is None and not inside):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind) and value == value:
            return kind(value)
    if isinstance(value, float):
        raise ConfigError(f"{name}: expected a finite number or inf, got nan")
    hint = "; leave it out" if value is None else ""
    raise ConfigError(f"{name}: {value!r} is no text, number, true, false, date, list or table{hint}")
