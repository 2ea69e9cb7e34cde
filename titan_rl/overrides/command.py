"""The command line of a verb, `--recipe NAME --config FILE.toml --section.key VALUE …`, its errors and its help.

Every verb is read here, so all have the same style and the same help. An error is one sentence, with exit code 2. The
help lists every setting with its value, its type and the docstring of its field.
"""

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from titan_rl.errors import ConfigError
from titan_rl.importing import absolute_name
from titan_rl.overrides.settings import Override, Table, convert_value, describe, fields_of, group_in

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


@dataclass(kw_only=True)
class Command:
    """A command line, read but not yet looked up."""

    recipe: str = ""
    """As it was given, on the command line or else in the file; the name of a file is absolute."""
    layers: list[list[Override]] = field(default_factory=list)
    """TOML first, then the command line's own."""
    flags: set[str] = field(default_factory=set)
    """Options without a value that were given, such as `--dry-run`."""
    values: dict[str, str] = field(default_factory=dict)
    """Value of every other option that is no setting, such as `--resume`."""
    words: list[str] = field(default_factory=list)
    """What is no option, of a verb that takes it."""

    @property
    def given(self) -> set[str]:
        """Dotted names of the settings that somebody has set."""
        return {override.key for layer in self.layers for override in layer}

    def lay_over(self, before: "Command") -> None:
        """Go on from the recipe and the settings of another command line, with those of this one on top."""
        self.recipe, self.layers = before.recipe, [*before.layers, *self.layers]

    def word(self, what: str, default: str | None = None) -> str:
        """The only word. Raises ConfigError if there are several, or none and no default."""
        if len(self.words) > 1:
            raise ConfigError(f"takes one {what}, got {' '.join(self.words)}")
        word = self.words[0] if self.words else default
        if word is None:
            raise ConfigError(f"name a {what}")
        return word


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One verb of the command line: its settings, its options and its action."""

    act: Callable[[Command, str], int]
    """Given the command and the program's name; returns the exit code. A ConfigError is printed, with exit code 2."""
    about: str
    """First paragraphs of the help; `{prog}` is the program's name."""
    options: Mapping[str, str | tuple[str, str]] = field(default_factory=dict)
    """Options besides settings → a line of help: `--recipe NAME`, `--resume RUN`, `--dry-run`. Of one that is short for
    a setting, `--port PORT`, the setting and the help; one without a value switches its setting on."""
    config: Callable[[Command], Any] = lambda command: None
    """The config whose settings the help lists; None: there are none."""
    takes_words: bool = False
    """Whether there may be words that are no options, such as the directory of a run."""
    takes_settings: bool = True

    def run(self, argv: Sequence[str], *, prog: str) -> int:
        try:
            command = self.read(argv)
            if "--help" in command.flags:
                self._print_help(self.config(command), prog)
                return 0
            if command.given and not self.takes_settings:
                raise ConfigError(f"takes no settings; leave out {', '.join(sorted(command.given))}")
            return self.act(command, prog)
        except ConfigError as error:
            print_error(prog, error)
            return EXIT_USAGE

    def read(self, argv: Sequence[str]) -> Command:
        """The words, and the TOML file that they name. Raises ConfigError: an option without its value, or a TOML file
        that is missing or broken."""
        aliases = {option.split()[0]: each[0] for option, each in self.options.items() if isinstance(each, tuple)}
        flags = {"--help", *(option for option in self.options if " " not in option and option not in aliases)}
        valued = {"--config", *(option.split()[0] for option in self.options if "." not in option.split()[0])}
        valued -= {*flags, *aliases}
        command = Command()
        settings: list[tuple[str, str, list[str]]] = []
        arguments = ["--help" if word == "-h" else word for word in argv]
        if self.takes_words:
            first = next((place for place, word in enumerate(arguments) if word.startswith("--")), len(arguments))
            command.words, arguments = arguments[:first], arguments[first:]
        for option, words in split_options(arguments):
            name = option.replace("_", "-")
            if name in flags:
                if words and not self.takes_words:
                    raise ConfigError(f"{option}: takes no value, got {' '.join(words)!r}")
                command.words += words
                command.flags.add(name)
            elif name in valued:
                command.values[name] = _single(option, words)
            elif name in aliases:
                words = words or ["true"] * (name in self.options)  # an option that is listed without a value
                _single(option, words)
                settings.append((option, aliases[name], words))
            else:
                settings.append((option, option.removeprefix("--"), words))
        if name := command.values.pop("--config", ""):
            file = Path(name).expanduser()
            table = read_toml(file)
            if "--recipe" in valued:
                recipe = convert_value(str, table.pop("recipe", ""), f"{file}: recipe")
                command.recipe = absolute_name(recipe, file.resolve().parent)
            command.layers.append(toml_overrides(table, file))
        if recipe := command.values.pop("--recipe", ""):
            command.recipe = absolute_name(recipe, Path.cwd())
        command.layers.append(option_overrides(settings, Path.cwd()))
        return command

    def _print_help(self, config: Any, prog: str) -> None:
        print(self.about.format(prog=prog).strip())
        if self.options:
            print("\noptions")
            width = max(map(len, self.options))
            for option, each in self.options.items():
                text = f"  {option.ljust(width)}  {each if isinstance(each, str) else each[1]}"
                print(textwrap.fill(text, WIDTH, subsequent_indent=" " * (width + 4)))
        if config is not None:
            print(
                "\nsettings and their values; the command line wins over --config FILE.toml, and that over the recipe"
            )
            print(*_settings(config, "", {option.split()[0] for option in self.options}), sep="\n")


def print_error(prog: str, message: object) -> None:
    print(f"{prog}: {' '.join(str(message).split())}", file=sys.stderr)


def split_options(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """`["--a.b", "1", "2", "--c=3"]` → `[("--a.b", ["1", "2"]), ("--c", ["3"])]`.

    A word that starts with one dash is a value (`-1`); a value that starts with two is written `--key=--value`. Raises
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
        Override(path=tuple(setting.replace("-", "_").split(".")), value=words, origin=option, base=base, words=True)
        for option, setting, words in options
    ]


def read_toml(file: Path) -> Table:
    """The content of a TOML file; raises ConfigError where there is none."""
    try:
        return tomli.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{file}: is not valid TOML: {error}") from None


def toml_overrides(table: Mapping[str, Any], file: Path, owner: tuple[str, ...] = ()) -> list[Override]:
    """One override for every value in `table`, which is what the file holds below `owner`. An empty table is a value
    too: it empties a dict."""
    found: list[Override] = []
    for name, value in table.items():
        path = (*owner, name)
        if isinstance(value, dict) and value:
            found += toml_overrides(value, file, path)
        else:
            origin = f"{file.name}: {'.'.join(path)}"
            found.append(Override(path=path, value=value, origin=origin, base=file.resolve().parent))
    return found


def _single(option: str, words: list[str]) -> str:
    if len(words) != 1 or not words[0]:
        raise ConfigError(f"{option}: expected one value, got {' '.join(words) or 'nothing'!r}")
    return words[0]


WIDTH = 110


def _settings(config: Any, prefix: str, listed: Collection[str] = ()) -> Iterator[str]:
    docs = field_docs(type(config))
    groups = []
    for name, hint in fields_of(type(config)).items():
        value, option = getattr(config, name), f"--{prefix}{name}".replace("_", "-")
        if option in listed:
            continue
        if (kind := group_in(hint)) is not None:
            groups.append((name, kind() if value is None else value))
            continue
        if isinstance(value, dict):
            yield from [f"  {option}.{key} {each}" for key, each in value.items()] or [f"  {option}.NAME VALUE"]
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
