"""The command line of a verb: `--recipe NAME --config FILE.toml --section.key VALUE …`, its help and its errors.

Every verb reads its words here: the same style, the same help, one sentence and exit code 2 for what is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.errors import ConfigError
from titan_rl.overrides.layers import Override
from titan_rl.overrides.sources import option_overrides, read_toml, split_options, toml_overrides

EXIT_USAGE = 2


@dataclass(kw_only=True)
class Command:
    """A command line, read but not yet looked up."""

    recipe: str = ""
    """As it was given, on the command line or else in the file."""
    recipe_base: Path = field(default_factory=Path.cwd)
    """A relative file name in `recipe` starts here."""
    layers: list[list[Override]] = field(default_factory=list)
    """TOML first, then the command line's own."""
    flags: set[str] = field(default_factory=set)
    """Options without a value that were given, such as `--dry-run`."""

    @property
    def given(self) -> set[str]:
        """Dotted names of the settings that somebody has set."""
        return {override.key for layer in self.layers for override in layer}


@dataclass(frozen=True, kw_only=True)
class Verb:
    """What a verb takes, and what it does with it."""

    act: Callable[[Command, str], int]
    """Given the command and the program's name; returns the exit code. A ConfigError is said, and exit code 2."""
    config: Callable[[Command], Any]
    """What the settings would be laid over, for the help."""
    about: str
    """First paragraphs of the help; `{prog}` is the program's name."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options besides settings → a line of help: `--recipe NAME`, `--port PORT`, `--dry-run`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Short option → the setting that it is."""

    def run(self, argv: Sequence[str], *, prog: str) -> int:
        """Do what the words say; returns the exit code."""
        try:
            command = self.read(argv)
            if "--help" in command.flags:
                from titan_rl.overrides.help import print_help

                print_help(self.config(command), about=self.about.format(prog=prog), options=self.options)
                return 0
            return self.act(command, prog)
        except ConfigError as error:
            say(prog, error)
            return EXIT_USAGE

    def read(self, argv: Sequence[str]) -> Command:
        """The words, and the TOML file that they name.

        Raises:
            ConfigError: an option without its value, or a TOML file that is missing or broken.
        """
        flags = {"--help", *(option for option in self.options if " " not in option)}
        takes_recipe = any(option.startswith("--recipe ") for option in self.options)
        command = Command()
        recipe, file, settings = "", None, []
        for option, words in split_options(["--help" if word == "-h" else word for word in argv]):
            name = option.replace("_", "-")
            if name in flags:
                if words:
                    raise ConfigError(f"{option}: takes no value, got {' '.join(words)!r}")
                command.flags.add(name)
            elif name == "--recipe" and takes_recipe:
                recipe = _single(option, words)
            elif name == "--config":
                file = Path(_single(option, words)).expanduser()
            elif name in self.aliases:
                _single(option, words)
                settings.append((option, self.aliases[name], words))
            else:
                settings.append((option, option.removeprefix("--"), words))
        if file is not None:
            table = read_toml(file)
            if takes_recipe:
                command.recipe = table.pop("recipe", "")
                command.recipe_base = file.resolve().parent
            if not isinstance(command.recipe, str):
                raise ConfigError(f"{file}: recipe: expected one text, got {command.recipe!r}")
            command.layers.append(toml_overrides(table, file))
        if recipe:
            command.recipe, command.recipe_base = recipe, Path.cwd()
        command.layers.append(option_overrides(settings, Path.cwd()))
        return command


def say(prog: str, message: object) -> None:
    """One line on standard error."""
    print(f"{prog}: {' '.join(str(message).split())}", file=sys.stderr)


def _single(option: str, words: list[str]) -> str:
    if len(words) != 1 or not words[0]:
        raise ConfigError(f"{option}: expected one value, got {' '.join(words) or 'nothing'!r}")
    return words[0]
