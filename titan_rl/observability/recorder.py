"""RUN/rollouts.jsonl: one JSON object per recorded rollout (`rollout.record` says what is in it).

Lines are written together or not at all. A file that cannot be written costs its lines and one sentence, never the run:
when there is room again, later ones are written.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_rl.observability.json_lines import append_lines, cut_lines, json_lines

ROLLOUTS = "rollouts.jsonl"
"""Of a run directory."""

_log = logging.getLogger(__name__)


class RolloutWriter:
    """Appends records. Thread-safe; never raises."""

    def __init__(self, directory: Path, *, keep_bytes: int = 0, say: Callable[[str], None] = lambda text: None) -> None:
        """
        Args:
            keep_bytes: of a file that is there; what follows them is cut off before the first record is written.
            say: told once that something was not recorded.
        """
        self._path = directory / ROLLOUTS
        self._lock = threading.Lock()
        self._say = say
        self._failed = False
        self._keep_bytes: int | None = keep_bytes

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        try:
            lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
            with self._lock:
                self._begin()
                with open(self._path, "ab", buffering=0) as file:
                    append_lines(file, lines)
        except Exception as error:  # also of values that are no JSON
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Something cannot be recorded."""
        _log.warning("not recorded", exc_info=error)
        if not self._failed:
            self._failed = True
            self._say(f"{self._path}: rollouts are missing, the run goes on: {type(error).__name__}: {error}")

    @property
    def nbytes(self) -> int:
        with self._lock:
            self._begin()
            return self._path.stat().st_size if self._path.is_file() else 0

    def _begin(self) -> None:
        keep_bytes, self._keep_bytes = self._keep_bytes, None
        if keep_bytes is not None:
            try:
                cut_lines(self._path, keep_bytes)
            except OSError as error:
                self.failed(error)


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file in their order, of a run that may be going on: a last line that is torn is skipped.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return (record for _, record in json_lines(path, strict=True))


def newest_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the last step, and of the last evaluation, in the same order."""
    last = {record["purpose"]: record["step"] for record in records}
    return [record for record in records if record["step"] == last[record["purpose"]]]
