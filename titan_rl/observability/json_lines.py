"""Files of JSON that may be cut off: what is not a whole JSON object is left out.

NaN and infinity, which JSON does not have, are None.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

TAIL = 1 << 20
"""Bytes at the end of a file that hold what is newest: some steps with their evaluation, some rollouts."""

_decode = json.JSONDecoder(parse_constant=lambda name: None).decode


def json_lines(
    path: Path, every: int = 1, *, start: int = 0, strict: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Offset and content of every n-th whole line; none where the file cannot be read.

    Args:
        start: the offset of the first line; below 0: so many bytes before the end, but for a line cut by that.
        strict: raise OSError where the file cannot be read, and ValueError where a line is no JSON object.
    """
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


def append_lines(file: FileIO, lines: bytes) -> None:
    """Write whole lines, all or none, at the end of a file without a buffer. Raises OSError if there is no room."""
    before = os.fstat(file.fileno()).st_size
    try:
        if lines and file.write(lines) < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):  # a device has no length
            os.ftruncate(file.fileno(), before)
        raise


def cut_lines(path: Path, keep: int) -> int:
    """Shorten a file to `keep` bytes, or to the last whole line in them; returns its length."""
    if not path.is_file():
        return 0
    with open(path, "rb+") as file:
        found = file.read(keep)
        kept = found.rfind(b"\n") + 1
        file.truncate(kept)
    return kept


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
