"""Lines of JSON that may be cut off.

A line that is not a whole JSON object is left out. NaN and infinity, which JSON does not have, are None.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(path: Path, every: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """Offset and content of every n-th line; none where the file cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        offset = 0
        for number, line in enumerate(file):
            if number % every == 0 and line.endswith(b"\n"):
                with contextlib.suppress(ValueError, RecursionError):
                    read = json.loads(line, parse_constant=lambda name: None)
                    if isinstance(read, dict):
                        yield offset, read
            offset += len(line)
