"""Turns a class named in a config into the class itself.

A name is a short name from a registry, `pkg.mod:Name`, or `path/to/file.py:Name`. A file is imported once per
process under a module name derived from its absolute path, so objects defined in it pickle between all
processes that imported it by the same path.

Whatever the user's code raises while it is imported or called here is a ConfigError with the file and the line.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_rl.errors import ConfigError, TitanError
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


def import_name(name: str, short_names: Mapping[str, str] | None = None) -> Any:
    """The object that `name` names.

    Args:
        name: a key of `short_names`, `pkg.mod:Name`, or `file.py:Name`.
        short_names: short name to `pkg.mod:Name`.

    Raises:
        ConfigError: unknown short name, missing module or attribute, or the module cannot be imported.
    """
    short_names = short_names or {}
    target = short_names.get(name, name)
    where, colon, attribute = target.rpartition(":")
    if target.endswith(".py"):
        raise ConfigError(f"{name!r} is a file: say what of it, as {name}:Name")
    if not colon or not where or not attribute:
        known = f"one of {', '.join(sorted(short_names))}, " if short_names else ""
        raise ConfigError(f"{name!r} names nothing: expected {known}'pkg.mod:Name' or 'file.py:Name'")
    module = import_user_module(where)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{name!r}: module {where!r} has no {attribute!r}") from None


class Named:
    """Stands for what a library only names here: nothing is an instance of it."""


@contextmanager
def left_out(modules: Mapping[str, Mapping[str, object]]) -> Iterator[None]:
    """For the length of the block these modules are not imported: who imports one gets a module with these contents.
    For libraries that import what they do not use here. A module that was imported before is left as it is.

    Args:
        modules: by name, the names that are taken from them, and what stands for each.
    """
    absent = {name: _Absent(name) for name in modules if name not in sys.modules}
    for name, module in absent.items():
        vars(module).update(modules[name])
    sys.modules.update(absent)
    try:
        yield
    finally:
        _put_back(absent)


class _Absent(ModuleType):
    """Stands for a module that is left out."""


def _put_back(absent: Mapping[str, ModuleType]) -> None:
    for name, module in absent.items():
        if sys.modules.get(name) is module:  # not if it was needed after all
            del sys.modules[name]


_COMPILER = "torch._dynamo"


def _unchanged(function: Any = None, *how: Any, **more: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return _unchanged if function is None else function


class _Part:
    """A module of the compiler that is not loaded: what eager code takes from it; anything else loads the compiler."""

    def __init__(self, name: str, **known: Any) -> None:
        self._name = name
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(getattr(_load_compiler(), self._name), name)


class _Unloaded(ModuleType):
    """torch's compiler until somebody uses it. What eager code asks of it does nothing."""

    __path__: list[str] = []
    graph_break = staticmethod(_unchanged)
    decorators = _Part("decorators", mark_unbacked=_unchanged)
    trace_rules = _Part("trace_rules", clear_lru_cache=_unchanged)

    def disable(self, fn: Any = None, *how: Any, **more: Any) -> Any:
        """torch's own marks, but for those that others set with `torch.compiler.disable`, are without effect."""
        module = sys._getframe(1).f_globals.get("__name__", "")
        if module.startswith("torch.") and module != "torch.compiler":
            return _unchanged(fn)
        return _load_compiler().disable(fn, *how, **more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module by whoever walks through all of them
            raise AttributeError(name)
        return getattr(_load_compiler(), name)


class _Submodules(MetaPathFinder, Loader):
    """Finds the submodules of the compiler that is not loaded, which loads it; most of them come with it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_COMPILER}."):
            return None
        if name == f"{_COMPILER}.config":  # eager code reads it
            return PathFinder.find_spec(name, [f"{root}/_dynamo" for root in sys.modules["torch"].__path__])
        compiler = _load_compiler()
        if name in sys.modules:
            return ModuleSpec(name, self, loader_state=sys.modules.pop(name))
        return PathFinder.find_spec(name, compiler.__path__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""


_SUBMODULES = _Submodules()
_loading = threading.Lock()


def _load_compiler() -> ModuleType:
    torch = sys.modules["torch"]
    with _loading:
        if unloaded := isinstance(sys.modules.get(_COMPILER), _Unloaded):
            del sys.modules[_COMPILER], vars(torch)["_dynamo"]
            sys.meta_path.remove(_SUBMODULES)
            _put_back({name: each for name, each in dict(sys.modules).items() if isinstance(each, _Absent)})
    compiler = importlib.import_module(_COMPILER)
    if unloaded:  # which was told to modules that were left out
        torch.use_deterministic_algorithms(
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
    return compiler


@contextmanager
def uncompiled(modules: Mapping[str, Mapping[str, object]]) -> Iterator[None]:
    """In the block, import without these modules (see `left_out`) and without torch's compiler, which takes longer than
    torch itself. Functions that are defined there to be compiled remain as they are.

    After it, the compiler is loaded when somebody uses it, such as a user's own loss. Until then torch's marks of what
    is not to be compiled cost nothing; FSDP sets one at every call of its hooks.
    """
    import torch

    if _COMPILER not in sys.modules:
        torch._dynamo = sys.modules[_COMPILER] = _Unloaded(_COMPILER)
        sys.meta_path.insert(0, _SUBMODULES)
    compiler = sys.modules[_COMPILER]
    if not isinstance(compiler, _Unloaded):
        yield
        return
    marks = ("disable", "allow_in_graph", "disallow_in_graph", "assume_constant_result")
    named: dict[str, object] = {**dict.fromkeys(marks, _unchanged), "OptimizedModule": Named}
    vars(compiler).update(named)
    compile_later: Any = torch.compile
    vars(torch)["compile"] = _unchanged
    try:
        with left_out(modules):
            yield
    finally:
        torch.compile = compile_later
        for name in named:
            delattr(compiler, name)
