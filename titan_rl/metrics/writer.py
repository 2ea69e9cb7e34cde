"""Numbers of a run: one JSON object per step in `metrics.jsonl`.

A line is complete or absent: each is written at once, so a killed run keeps every finished step. `metrics.jsonl` is the
record of a run. Where it cannot be written, because the disk is full or somebody removed the file, the run says so,
keeps the lines and goes on; on a disk that has room again a later step writes them. Ending there would lose more, since
nothing else could be saved either. A run whose lines cannot be written at its end fails.
"""

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from titan_rl.directories import METRICS
from titan_rl.errors import StorageError
from titan_rl.metrics.json_lines import JsonLines, encode_lines

GROUPS = "groups"
"""Key of a step's groups, by id."""


class MetricsWriter:
    """Writes the numbers of each step. Keys look like `train/loss`; values are plain numbers."""

    def __init__(
        self, directory: Path, *, keep_bytes: int = 0, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """`keep_bytes`: of a `metrics.jsonl` that is there; what follows them is cut off when the first line is
        written: until then the run has not gone on. `warn`: called when fewer are there, when lines cannot be written
        and when they can again."""
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / METRICS
        self._file = JsonLines(self._path)
        self._file.append(b"")  # from now on it is there, and whoever removes it is noticed
        self._keep_bytes: int | None = keep_bytes
        self._unwritten = b""
        self._lock = threading.Lock()  # checkpoints are committed in a thread
        self._warn = warn

    def write(self, step: int, numbers: dict[str, float], *, groups: Sequence[int] = ()) -> None:
        """One step's numbers. NaN and inf are written as null: JSON has no such values. `groups`: that the step
        trained."""
        self._begin()
        plain = {key: (value if math.isfinite(value) else None) for key, value in numbers.items()}
        late = bool(self._unwritten)
        try:
            self._write(encode_lines([{"step": step, **plain, **({GROUPS: [*groups]} if groups else {})}]))
        except StorageError as error:
            if not late:
                self._warn(f"{error}; the run goes on and keeps them until it can write them")
        else:
            if late:
                self._warn(f"{self._path}: the numbers that were kept are written")

    @property
    def nbytes(self) -> int:
        self._begin()
        with self._lock:
            return self._file.nbytes + len(self._unwritten)

    def sync(self) -> None:
        """Return when the numbers of all steps are on disk. Raises StorageError: they cannot be written, for example
        because the disk is full."""
        self._write()
        self._file.sync()

    def close(self) -> None:
        """Never raises."""
        try:
            self._write()
        except StorageError as error:
            self._warn(str(error))

    def _begin(self) -> None:
        """Before the first line: cut off what is not kept."""
        if (keep_bytes := self._keep_bytes) is None:
            return
        self._keep_bytes = None
        if (lost := keep_bytes - self._file.cut(keep_bytes)) > 0:
            self._warn(
                f"{self._path} was changed: {lost:,} of its {keep_bytes:,} bytes are gone, and the steps in them"
            )

    def _write(self, lines: bytes = b"") -> None:
        """Write these lines, after those that are not written yet: all or none."""
        with self._lock:
            self._unwritten += lines
            try:
                self._file.append(self._unwritten)
            except OSError as error:
                count = self._unwritten.count(b"\n")
                raise StorageError(f"{self._path}: {count} lines of numbers cannot be written: {error}") from error
            self._unwritten = b""
