"""Files of JSON that may be cut off: what is not a whole JSON object is left out.

NaN and infinity, which JSON does not have, are None.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
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
