"""The files of a run directory and the lock that a living run holds on it; directories that are replaced as a whole.

A directory that somebody names is replaced only if all that is in it was written by an earlier `replacing`, which
leaves a list of it.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_rl.errors import ConfigError, StorageError

CONFIG, SUMMARY = "config.toml", "summary.json"
"""Written when the run starts, and when it is done."""
ENDING = "ending.json"
"""Written when the run ends and its process still can: its exit code, and how it ended, in words."""
METRICS = "metrics.jsonl"
CONTROL = "control"
"""There while the run is up: a link to the socket that takes commands, whose own path must be short."""


def lock_run(run: Path, how: int = fcntl.LOCK_EX) -> int:
    """Returns the descriptor that holds the lock. Raises ConfigError if a living process has it."""
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{run} is the directory of a run that is still going on") from None
    return descriptor


def is_going_on(run: Path) -> bool:
    """Whether a living process has the run's directory."""
    try:
        os.close(lock_run(run, fcntl.LOCK_SH))
    except ConfigError:
        return True
    return False


WRITTEN = ".titan_rl.json"
"""In a directory that was written: a JSON list of the names in it."""


def check_replaceable(directory: Path) -> None:
    """Do nothing if `directory` does not exist, is empty, or holds only what the project wrote there. Raises
    ConfigError: replacing it would delete something else, which is named; or it is the working directory or one of its
    parents."""
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory} is there and is no directory; name a new or an empty one")
    if Path.cwd().is_relative_to(directory.resolve()):
        raise ConfigError(f"{directory} is the working directory or one of its parents; name a new directory")
    there = {each.name for each in directory.iterdir()}
    try:
        written = {str(name) for name in json.loads((directory / WRITTEN).read_text(encoding="utf-8"))} | {WRITTEN}
    except (OSError, ValueError, TypeError, RecursionError):
        written = set()
    if foreign := sorted(there - written):
        more = f" and {len(foreign) - 1} more" * (len(foreign) > 1)
        raise ConfigError(
            f"{directory} holds {foreign[0]}{more}, which would be deleted: only an earlier export is replaced; name a "
            "new or an empty directory"
        )


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """An empty directory to write to, which takes the place of `directory` at the end. If the block raises, what was
    there stays. Raises ConfigError as `check_replaceable` does."""
    directory = directory.absolute()
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield draft
        (draft / WRITTEN).write_text(json.dumps(sorted(each.name for each in draft.iterdir())) + "\n", encoding="utf-8")
        draft.chmod(0o755)
        check_replaceable(directory)  # somebody may have written to it meanwhile
        old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
        if directory.exists():
            os.rename(directory, old / directory.name)
        os.rename(draft, directory)
        shutil.rmtree(old)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_ending(run: Path, code: int, how: str) -> None:
    """`ENDING`. On a full disk there is none."""
    with suppress(StorageError):
        write_file(run / ENDING, json.dumps({"exit_code": int(code), "how": how}) + "\n")


def write_file(file: Path, text: str) -> None:
    """At no moment is there half a file, such as a config from which no run could go on. Raises StorageError."""
    draft = file.with_name(f".{file.name}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError as error:  # that of a full disk does not say which file
        raise StorageError(f"{file} cannot be written: {error.strerror}") from error
