"""Layers of overrides, laid over a config. See the package for what holds."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

from titan_rl.errors import ConfigError
from titan_rl.overrides.settings import (
    WrongType,
    did_you_mean,
    fields_of,
    fitting,
    members,
    optional_dataclass,
    settings,
)

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
    """What a config wants to happen besides setting the one value. Settings are dotted names."""

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
