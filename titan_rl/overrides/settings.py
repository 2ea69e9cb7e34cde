"""Settings of a config, and layers of overrides that are applied to it. The package's docstring states the rules."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from titan_rl.errors import ConfigError


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


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of nested plain data by their dotted names; those of the n-th table in a list as `list.n.name`."""
    for name, value in table.items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, Mapping) for each in value):
            value = {str(number): each for number, each in enumerate(value)}
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


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


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One setting and the value that somebody gave it."""

    path: tuple[str, ...]
    value: Any
    """As it was read: a value of TOML, or the words that followed an option."""
    origin: str
    """How its author wrote the setting: `--loop.steps` or `smoke.toml: loop.steps`."""
    base: Path
    """Relative file names in `value` start here."""
    convert: Callable[[Any, Any], Any]
    """`(type, value)` → the value with that type; raises WrongType."""
    guess: Callable[[Any, Any], Any]
    """`(value, value to be replaced)` → the value where no type is declared."""

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What else happens when a setting is set. Settings are dotted names."""

    alternatives: tuple[tuple[str, str], ...] = ()
    """Pairs of settings of which one excludes the other: a layer that sets one of them empties the other, unless it
    sets both."""
    arguments_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Setting that names a class → dict of its constructor arguments: another class starts without arguments."""
    file_settings: Mapping[str, Callable[[str, Path], str]] = dataclasses.field(default_factory=dict)
    """Setting that may hold a file name → makes that absolute, given the directory to start from."""


def apply(config: T, layers: Iterable[Sequence[Override]], rules: Rules | None = None) -> T:
    """A new config with the layers applied in order, every `__post_init__` of it run once at the end.

    Raises:
        ConfigError: unknown setting, wrong type, or values that do not fit together.
    """
    result = copy.deepcopy(config)
    for layer in layers:
        _apply_layer(result, layer, rules or Rules())
    return _checked(result)


def _apply_layer(config: Any, layer: Sequence[Override], rules: Rules) -> None:
    set_here = {".".join(each.path[:length]) for each in layer for length in range(1, len(each.path) + 1)}
    # the name of a class before its arguments, wherever in the layer it stands: the name empties them
    for override in sorted(layer, key=lambda each: each.key not in rules.arguments_of):
        arguments = rules.arguments_of.get(override.key)
        before = get_setting(config, override.key) if arguments else None
        value = _set(config, override, rules)
        if arguments and value != before:
            get_setting(config, arguments).clear()
        for pair in rules.alternatives:
            for chosen, other in (pair, pair[::-1]):
                chooses = override.key == chosen and value not in ("", None)
                if (chooses or override.key.startswith(f"{chosen}.")) and other not in set_here:
                    _empty(config, other)


def get_setting(config: Any, key: str) -> Any:
    """The value of a setting by its dotted name."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def absolute_files(config: T, settings: Mapping[str, Callable[[str, Path], str]], base: Path) -> T:
    """A copy of `config` in which the named settings are absolute file names, relative ones starting at `base`. Keys of
    dicts that are not there stay away.

    Args:
        settings: as `Rules.file_settings`.
    """
    result = copy.deepcopy(config)
    for key, absolute in settings.items():
        owner, _, name = key.rpartition(".")
        node = get_setting(result, owner) if owner else result
        value = node.get(name) if isinstance(node, dict) else getattr(node, name)
        if not isinstance(value, str | Path):
            continue  # not there, or of a type that is refused later
        if isinstance(node, dict):
            node[name] = absolute(str(value), base)
        else:
            setattr(node, name, absolute(str(value), base))
    return result


def _empty(config: Any, key: str) -> None:
    owner, _, name = key.rpartition(".")
    node = get_setting(config, owner) if owner else config
    setattr(node, name, "" if isinstance(getattr(node, name), str) else None)


def _set(config: Any, override: Override, rules: Rules) -> Any:
    """Set the value in place, without any `__post_init__`; returns it converted."""
    node, path = config, override.path
    for depth, name in enumerate(path):
        hint = fields_of(node).get(name)
        if hint is None:
            raise ConfigError(_unknown(config, override))
        child = getattr(node, name)
        group = optional_dataclass(hint)
        if depth == len(path) - 1 and override.value != {}:
            value = _converted(hint, override)
            if isinstance(value, str) and override.key in rules.file_settings:
                value = rules.file_settings[override.key](value, override.base)
            setattr(node, name, value)
            return value
        if isinstance(child, dict):
            return _set_in_dict(child, path[depth + 1 :], override, rules)
        if child is None and group is not None:
            child = group()
            setattr(node, name, child)
        if not dataclasses.is_dataclass(child):
            raise ConfigError(f"{override.origin}: {'.'.join(path[: depth + 1])} has no settings below it")
        node = child
    return node  # an empty table of TOML: the group with what it has


def _set_in_dict(target: dict[str, Any], keys: Sequence[str], override: Override, rules: Rules) -> Any:
    if not keys:  # an empty table of TOML
        target.clear()
        return target
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{override.origin}: {key} has no settings below it")
    value = override.guess(override.value, target.get(keys[-1]))
    if isinstance(value, str) and override.key in rules.file_settings:
        value = rules.file_settings[override.key](value, override.base)
    target[keys[-1]] = value
    return value


def _converted(hint: Any, override: Override) -> Any:
    is_dict = any(kind is dict or get_origin(kind) is dict for kind in members(hint))
    try:
        return override.convert(hint, override.value)
    except WrongType as error:
        if is_dict or optional_dataclass(hint) is not None:
            raise ConfigError(f"{override.origin}: is a group of settings, set {override.key}.NAME") from None
        given = " ".join(override.value) if isinstance(override.value, list) else override.value
        raise ConfigError(
            f"{override.origin}: expected {error}, got {repr(given) if given != '' else 'nothing'}"
        ) from None


def _unknown(config: Any, override: Override) -> str:
    meant = did_you_mean(override.key, settings(config))
    if override.origin.startswith("--"):
        meant = meant.replace("did you mean ", "did you mean --").replace("_", "-")
    return f"{override.origin}: there is no such setting{meant}"


def _checked(config: Any, prefix: str = "") -> Any:
    """The same dataclass built anew from the inside out, so that every `__post_init__` sees the final values, and each
    value has the type of its field: a recipe is Python, which holds nobody to it."""
    changes = {}
    for name, hint in fields_of(config).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            changes[name] = _checked(value, f"{prefix}{name}.")
        elif not isinstance(value, dict):
            try:
                changes[name] = fitting(hint, value)
            except WrongType as error:
                raise ConfigError(f"{prefix}{name}: expected {error}, got {value!r}") from None
    return dataclasses.replace(config, **changes)
