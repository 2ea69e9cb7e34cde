"""Rows of a data set, and which prompts are held out.

A prompt is held out if a hash of its text says so (`is_held_out`). Seed, order and other rows do not matter. Rows of
one text are either all trained or all held out.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.errors import AbsentError, ConfigError
from titan_rl.importing import import_package
from titan_rl.types import Message

HELD_OUT_SHARE = 10
"""One prompt in so many is held out."""


def is_held_out(text: str) -> bool:
    """By a hash that is the same in every process and easy to compute elsewhere: h = (h * 131 + ord(c)) mod 1000003."""
    value = 0
    for character in text:
        value = (value * 131 + ord(character)) % 1_000_003
    return value % HELD_OUT_SHARE == 0


Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file (JSON lines, or Parquet with pyarrow), a list of dicts, or a `datasets.Dataset`."""
SUFFIXES = (".jsonl", ".parquet")
"""Of such files."""


def read_rows(setting: str, rows: Rows) -> Iterator[tuple[str, Any]]:
    """Every row, with where it stands for messages. `setting`: that names the file, for messages. Raises AbsentError:
    there is no such file, or nothing to read it with; ConfigError: it cannot be read, or has no rows."""
    if isinstance(rows, (str, Path)):
        file = Path(rows)
        if not file.is_file():
            raise AbsentError(f"{setting}: there is no file {file}")
        numbered = _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)
    else:
        numbered = ((f"row {number}", row) for number, row in enumerate(rows, start=1))
    if (first := next(numbered, None)) is None:
        raise ConfigError(f"{setting}: {rows} has no rows")
    yield first
    yield from numbered


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{file}:{number}", json.loads(line)
        except ValueError as error:  # neither JSON nor UTF-8
            raise ConfigError(f"{file}:{number}: not a line of JSON ({error})") from error


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    import_package("pyarrow.parquet", for_what=f"{file}: Parquet", install="titan-rl[parquet]")
    import pyarrow

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: not a Parquet file ({error})") from error
    for number, row in enumerate(rows, start=1):
        yield f"{file}: row {number}", row


def prompt_messages(where: str, prompt: object) -> tuple[Message, ...]:
    """A row's prompt, a text or a list of `{"role": …, "content": …}`. Raises ConfigError if it is neither."""
    if isinstance(prompt, str) and prompt.strip():
        return (Message("user", prompt),)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt):
        try:
            return tuple(Message(str(each["role"]), str(each["content"])) for each in prompt)
        except KeyError as error:
            raise ConfigError(f"{where}: a message of the prompt has no {error}") from error
    raise ConfigError(f"{where}: the prompt is {prompt!r}; it must be a text or a list of messages")
