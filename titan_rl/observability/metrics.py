"""Numbers of a run: one JSON object per step in `metrics.jsonl`, the same in TensorBoard, W&B only when asked.

A line is complete or absent: each is written at once, so a killed run keeps every finished step. `metrics.jsonl` is the
record of a run. Where it cannot be written, because the disk is full or somebody removed the file, the run says so,
keeps the lines and goes on; on a disk that has room again a later step writes them. Ending there would lose more, since
nothing else could be saved either. A run whose lines cannot be written at its end fails. TensorBoard and W&B only show
what is in there (`backends`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan_rl.errors import ConfigError, StorageError
from titan_rl.observability.backends import Backend, Step, TensorBoard, WeightsAndBiases, close_all
from titan_rl.observability.json_lines import append_lines, cut_lines, json_lines

GROUPS = "groups"
"""Key of a step's groups, by id."""


class MetricsWriter:
    """Writes the numbers of each step. Keys look like `train/loss`; values are plain numbers."""

    def __init__(
        self,
        directory: Path,
        *,
        tensorboard: bool,
        wandb_project: str = "",
        run_name: str = "",
        config: Any = None,
        keep_bytes: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """
        Args:
            directory: of the run; made if absent.
            config: the run config as nested plain data, shown by W&B.
            keep_bytes: of a `metrics.jsonl` that is there; what follows them is cut off when the first line is
                written. Until then the run has not gone on.
            say: told when fewer than `keep_bytes` are there, when lines cannot be written and when they can again, and
                once, in any thread, of each of TensorBoard and W&B that fails.

        Raises:
            ConfigError: TensorBoard or W&B is asked for and not installed.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "metrics.jsonl"
        self._file = open(self._path, "ab", buffering=0)
        self._keep_bytes: int | None = keep_bytes
        self._unwritten = b""
        self._lock = threading.Lock()  # checkpoints are committed in a thread
        self._say = say
        self._backends: list[Backend] = []
        self._tensorboard = directory / "tensorboard" if tensorboard else None
        if tensorboard:
            _require("tensorboard", "logging.tensorboard is on")
        if wandb_project:
            _require("wandb", "logging.wandb_project is set")
            begin = partial(WeightsAndBiases, directory, project=wandb_project, name=run_name, config=config)
            self._backends.append(Backend("W&B", begin, say))

    def write(self, step: int, numbers: dict[str, float], *, groups: Sequence[int] = ()) -> None:
        """One step's numbers. NaN and inf are written as null: JSON has no such values.

        Args:
            groups: that the step trained; only in `metrics.jsonl`.
        """
        self._begin()
        plain = {key: (value if math.isfinite(value) else None) for key, value in numbers.items()}
        line = json.dumps({"step": step, **plain, **({GROUPS: [*groups]} if groups else {})}) + "\n"
        kept = bool(self._unwritten)
        try:
            self._write(line.encode())
        except StorageError as error:
            if not kept:
                self._say(f"{error}; the run goes on and keeps them until it can write them")
        else:
            if kept:
                self._say(f"{self._path}: the numbers that were kept are written")

        for backend in self._backends:
            backend.put(Step(step, dict(numbers)))

    @property
    def nbytes(self) -> int:
        """Of all steps."""
        self._begin()
        with self._lock:
            return os.fstat(self._file.fileno()).st_size + len(self._unwritten)

    def sync(self) -> None:
        """Return when the numbers of all steps are on disk.

        Raises:
            StorageError: they cannot be written, for example because the disk is full.
        """
        self._write()
        os.fsync(self._file.fileno())

    def _begin(self) -> None:
        """Before the first line: cut off what is not kept."""
        if (keep_bytes := self._keep_bytes) is None:
            return
        self._keep_bytes = None
        if (lost := keep_bytes - cut_lines(self._path, keep_bytes)) > 0:
            self._say(f"{self._path} was changed: {lost:,} of its {keep_bytes:,} bytes are gone, and the steps in them")
        if self._tensorboard is not None:
            for file in self._tensorboard.glob("events.out.tfevents.*"):
                file.unlink()  # TensorBoard cannot cut it off at a step: all steps are drawn again
            begin = partial(TensorBoard, self._tensorboard)
            self._backends.append(Backend("TensorBoard", begin, self._say, self._earlier()))

    def _write(self, lines: bytes = b"") -> None:
        """Write these lines, after those that are not written yet: all or none."""
        with self._lock:
            self._unwritten += lines
            try:
                if not os.fstat(self._file.fileno()).st_nlink:  # removed: whatever is written to it is lost
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                append_lines(self._file, self._unwritten)
            except OSError as error:
                count = self._unwritten.count(b"\n")
                raise StorageError(f"{self._path}: {count} lines of numbers cannot be written: {error}") from error
            self._unwritten = b""

    def _earlier(self) -> list[Step]:
        """The steps that are in the file; a line that is damaged is left out."""
        steps = []
        for _, numbers in json_lines(self._path):
            step = numbers.pop("step")
            numbers.pop(GROUPS, None)
            steps.append(Step(step, {key: math.nan if value is None else value for key, value in numbers.items()}))
        return steps

    def close(self) -> None:
        """Never raises."""
        try:
            self._write()
        except StorageError as error:
            self._say(str(error))
        self._file.close()
        close_all(self._backends)


def _require(package: str, asked: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{asked}, but the package {package} is not installed")
