"""Turns a class named in a config into the class itself.

A name is a short name from a registry, `pkg.mod:Name`, or `path/to/file.py:Name`. A file is imported once per
process under a module name derived from its absolute path, so objects defined in it pickle between all
processes that imported it by the same path.

Whatever the user's code raises while it is imported or called here is a ConfigError with the file and the line.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_rl.errors import AbsentError, ConfigError, TitanError
from titan_rl.one_line import one_line

LONGEST_EXCEPTION = 300
"""Characters of what an exception says that are told in one line; its traceback has all of them."""

_LIBRARIES = ("<", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")))


@contextmanager
def user_code(where: str) -> Iterator[None]:
    """Turn what the user's code raises into a ConfigError that says file and line, or `where` if no line is known.

    `exit()` counts as an error: a task must not end the command that checks it.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        said = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(f"{_line_of(error) or where}: {type(error).__name__}: {said}") from error


def places_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Where it passed on its way, the place where it was raised last; without libraries."""
    return [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]


def describe(error: BaseException) -> str:
    """One line: what was raised, and the last place that is not in a library; our own errors say where themselves."""
    if isinstance(error, TitanError):
        return str(error)
    what = f"exit({error.code!r}) was called" if isinstance(error, SystemExit) else ""
    what = what or one_line("".join(traceback.format_exception_only(error)).strip(), LONGEST_EXCEPTION)
    places = places_of(error) or traceback.extract_tb(error.__traceback__)[-1:]
    return f"{what} ({places[-1].filename}:{places[-1].lineno} in {places[-1].name})" if places else what


def _line_of(error: BaseException) -> str:
    """The last line of the user's own that ran, or that could not be parsed; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    package = str(Path(__file__).parent) + os.sep
    lines = [f"{f.filename}, line {f.lineno}" for f in places_of(error) if not f.filename.startswith(package)]
    return lines[-1] if lines else ""


def import_file(path: str | Path) -> ModuleType:
    """Import a Python file under a name that depends only on its absolute path."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{path}: no such file (looked for {file})")
    name = f"titan_rl_user_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with user_code(str(file)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_package(name: str, *, for_what: str, install: str) -> Any:
    """A module of a package that need not be installed. Raises AbsentError, which says what `for_what` needs."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        needs = f"{for_what} needs the package {name.partition('.')[0]} ({error})"
        raise AbsentError(f"{needs}: install it with `pip install '{install}'`") from error


def import_user_module(name: str) -> ModuleType:
    """Import `pkg.mod` or `file.py`."""
    if name.endswith(".py"):
        return import_file(name)
    with user_code(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists; something that it imports does not
            raise ConfigError(f"there is no module {name!r}") from error


def import_name(name: str, short_names: Mapping[str, str] | None = None, base: type = object) -> Any:
    """The object that `name` names: a key of `short_names` (short name → `pkg.mod:Name`), `pkg.mod:Name`, or
    `file.py:Name`. Raises ConfigError: there is none, its module cannot be imported, or it is no subclass of `base`."""
    short_names = short_names or {}
    target = short_names.get(name, name)
    where, colon, attribute = target.rpartition(":")
    if target.endswith(".py"):
        raise ConfigError(f"{name!r} is a file: say what of it, as {name}:Name")
    if not colon or not where or not attribute:
        known = f"one of {', '.join(sorted(short_names))}, " if short_names else ""
        raise ConfigError(f"{name!r} names nothing: expected {known}'pkg.mod:Name' or 'file.py:Name'")
    module = import_user_module(where)
    if not hasattr(module, attribute):
        raise ConfigError(f"{name!r}: module {where!r} has no {attribute!r}")
    found = getattr(module, attribute)
    if base is not object and not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{name} is no subclass of {base.__module__}.{base.__qualname__}")
    return found


def absolute_name(name: str, base: Path) -> str:
    """`file.py:Name` with the absolute path of the file, which starts at `base`; other names as they are."""
    file, colon, attribute = name.rpartition(":")
    return f"{absolute_path(file, base)}:{attribute}" if colon and file.endswith(".py") else name


def absolute_path(path: str, base: Path) -> str:
    """`path`, which starts at `base`, absolute; an empty one stays empty."""
    return str((base / Path(path).expanduser()).resolve()) if path else path


def installed(package: str) -> str:
    """Version of a package, or of its build for CPUs; empty if there is none."""
    for name in (package, f"{package}-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""
