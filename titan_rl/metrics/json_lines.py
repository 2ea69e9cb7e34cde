"""Files of JSON objects, one per line: appended by one process, read by others at any moment.

- An append writes all of its lines or none of them.
- A file may be cut off anywhere: who reads it leaves out what is not a whole JSON object.
- NaN and infinity, which JSON does not have, are read as None.
"""

import contextlib
import errno
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

TAIL = 1 << 20
"""Bytes at the end of a file that hold what is newest: some steps with their evaluation, some rollouts."""

_decode = json.JSONDecoder(parse_constant=lambda name: None).decode


def json_lines(
    path: Path, every: int = 1, *, start: int = 0, strict: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Offset and object of every n-th whole line; none where the file cannot be read. `start`: the offset of the first
    line; below 0: so many bytes before the end, but for a line cut by that. `strict`: raise OSError where the file
    cannot be read, and ValueError where a line is no JSON object."""
    try:
        with open(path, "rb") as file:
            offset = file.seek(start if start >= 0 else max(0, os.fstat(file.fileno()).st_size + start))
            for number, line in enumerate(file):
                if number % every == 0 and line.endswith(b"\n"):
                    if (read := _object(line)) is not None:
                        yield offset, read
                    elif strict:
                        raise ValueError(f"the line at byte {offset} is no JSON object")
                offset += len(line)
    except OSError:
        if strict:
            raise


def encode_lines(objects: Iterable[dict[str, Any]]) -> bytes:
    """Raises TypeError or ValueError for a value that is no JSON."""
    return "".join(json.dumps(each, allow_nan=False) + "\n" for each in objects).encode()


class JsonLines:
    """A file to append to. It is made by the first append; if somebody removes it after that, an append fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT

    def append(self, lines: bytes) -> None:
        """Raises OSError if they cannot be written, for example because the disk is full."""
        with self._open() as file:
            before = os.fstat(file.fileno()).st_size
            try:
                if lines and file.write(lines) < len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):  # a device has no length
                    os.ftruncate(file.fileno(), before)
                raise

    def sync(self) -> None:
        """Return when all lines are on disk. Raises OSError."""
        with self._open() as file:
            os.fsync(file.fileno())

    def cut(self, keep_bytes: int | None = None) -> int:
        """Shorten the file to so many bytes, or to the last whole line in them; returns its length. None: cut off only
        a last line that is torn."""
        if not self._path.is_file():
            return 0
        with open(self._path, "rb+") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if keep_bytes is None else min(keep_bytes, size)
            if end:
                with mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as text:
                    end = text.rfind(b"\n") + 1
            file.truncate(end)
        return end

    @property
    def nbytes(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0

    def _open(self) -> FileIO:
        file = FileIO(os.open(self._path, self._flags, 0o644), "ab")
        self._flags &= ~os.O_CREAT
        return file


def json_object(path: Path) -> dict[str, Any]:
    """The object that is the whole file; empty where there is none."""
    with contextlib.suppress(OSError):
        return _object(path.read_bytes()) or {}
    return {}


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        read = _decode(text.decode())
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None
