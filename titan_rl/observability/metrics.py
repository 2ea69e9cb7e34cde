"""Numbers of a run: one JSON object per step in `metrics.jsonl`, the same in TensorBoard, W&B only when asked.

A line is complete or absent: each is written at once, so a killed run keeps every finished step. `metrics.jsonl` is the
record of a run. Where it cannot be written, because the disk is full or somebody removed the file, the run says so,
keeps the lines and goes on; on a disk that has room again a later step writes them. Ending there would lose more, since
nothing else could be saved either. A run whose lines cannot be written at its end fails. TensorBoard and W&B only show
what is in there: when one of them fails, the run says so once and goes on without it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_rl.errors import ConfigError, StorageError

TENSORBOARD = "TensorBoard"
WANDB = "W&B"
GROUPS = "groups"
"""Key of a step's groups, by id."""

_log = logging.getLogger(__name__)


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
            keep_bytes: of a `metrics.jsonl` that is there; what follows them is cut off.
            say: told when fewer than `keep_bytes` are there, when lines cannot be written and when they can again, and
                once of each of TensorBoard and W&B that fails.

        Raises:
            ConfigError: TensorBoard or W&B is asked for and not installed.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "metrics.jsonl"
        if (lost := keep_bytes - _cut(self._path, keep_bytes)) > 0:
            say(f"{self._path} was changed: {lost:,} of its {keep_bytes:,} bytes are gone, and the steps in them")
        self._file = open(self._path, "ab", buffering=0)
        self._unwritten = b""
        self._lock = threading.Lock()  # checkpoints are committed in a thread
        self._say = say
        self._shows: dict[str, Any] = {}
        if tensorboard:
            try:
                from tensorboard.summary import Writer
            except ImportError as error:
                raise ConfigError("logging.tensorboard is on, but the package tensorboard is not installed") from error
            with self._giving_up(TENSORBOARD):
                shutil.rmtree(directory / "tensorboard", ignore_errors=True)
                self._shows[TENSORBOARD] = Writer(str(directory / "tensorboard"))
                self._show_again()
        if wandb_project:
            try:
                import wandb
            except ImportError as error:
                raise ConfigError("logging.wandb_project is set, but the package wandb is not installed") from error
            with self._giving_up(WANDB):
                self._shows[WANDB] = wandb.init(
                    project=wandb_project, name=run_name, id=run_name, resume="allow", dir=str(directory), config=config
                )

    def write(self, step: int, numbers: dict[str, float], *, groups: Sequence[int] = ()) -> None:
        """One step's numbers. NaN and inf are written as null: JSON has no such values.

        Args:
            groups: that the step trained; only in `metrics.jsonl`.
        """
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

        with self._giving_up(TENSORBOARD):
            self._draw(step, numbers)
        if (run := self._shows.get(WANDB)) is not None:
            with self._giving_up(WANDB):
                run.log(numbers, step=step)

    @property
    def nbytes(self) -> int:
        """Of all steps."""
        with self._lock:
            return os.fstat(self._file.fileno()).st_size + len(self._unwritten)

    def sync(self) -> None:
        """Return when the numbers of all steps are on disk.

        Raises:
            StorageError: they cannot be written, for example because the disk is full.
        """
        self._write()
        os.fsync(self._file.fileno())

    def _write(self, lines: bytes = b"") -> None:
        """Write these lines, after those that are not written yet: all or none."""
        with self._lock:
            self._unwritten += lines
            state = os.fstat(self._file.fileno())
            try:
                if not state.st_nlink:  # the file was removed, and whatever is written to it is lost
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                if self._unwritten and self._file.write(self._unwritten) < len(self._unwritten):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                with contextlib.suppress(OSError):  # a device has no length
                    os.ftruncate(self._file.fileno(), state.st_size)
                count = self._unwritten.count(b"\n")
                raise StorageError(f"{self._path}: {count} lines of numbers cannot be written: {error}") from error
            self._unwritten = b""

    def _draw(self, step: int, numbers: dict[str, float]) -> None:
        if (writer := self._shows.get(TENSORBOARD)) is not None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)

    def _show_again(self) -> None:
        """Draw the steps of an earlier process, which TensorBoard cannot cut off at one of them."""
        for line in self._path.read_text(encoding="utf-8").splitlines():
            step, numbers = (read := json.loads(line)).pop("step"), read
            numbers.pop(GROUPS, None)
            self._draw(step, {key: math.nan if value is None else value for key, value in numbers.items()})

    def close(self) -> None:
        """Never raises."""
        try:
            self._write()
        except StorageError as error:
            self._say(str(error))
        self._file.close()
        for name, close in ((TENSORBOARD, "close"), (WANDB, "finish")):
            if name in self._shows:
                with self._giving_up(name):
                    getattr(self._shows[name], close)()

    @contextmanager
    def _giving_up(self, name: str) -> Iterator[None]:
        """Use a writer that may fail. One that fails gets no further steps."""
        try:
            yield
        except Exception as error:
            self._shows.pop(name, None)
            _log.warning("%s failed", name, exc_info=error)
            self._say(f"{name} failed and is told no more, the run goes on: {type(error).__name__}: {error}")


def _cut(path: Path, keep: int) -> int:
    """Shorten a file to `keep` bytes, or to the last whole line in them; returns its length."""
    if not path.is_file():
        return 0
    with open(path, "rb+") as file:
        found = file.read(keep)
        kept = found.rfind(b"\n") + 1
        file.truncate(kept)
    return kept
