"""Numbers of a run: one JSON object per step in `metrics.jsonl`, the same in TensorBoard, W&B only when asked.

A line is complete or absent: each is written at once, so a killed run keeps every finished step. `metrics.jsonl` is the
record of a run. Where it cannot be written, because the disk is full or somebody removed the file, the run says so,
keeps the lines and goes on; on a disk that has room again a later step writes them. Ending there would lose more, since
nothing else could be saved either. A run whose lines cannot be written at its end fails.

TensorBoard and W&B only show what is in there. Each has a thread of its own: one that fails, or hangs, is said once and
told no more, and costs the run nothing but its picture.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titan_rl.directories import METRICS
from titan_rl.errors import StorageError
from titan_rl.metrics.json_lines import JsonLines, encode_lines, json_lines
from titan_rl.metrics.metric_table import metric_of

GROUPS = "groups"
"""Key of a step's groups, by id."""
MOST_WAITING = 1000
"""Steps that a backend may be behind. One that is further behind hangs."""
START_SECONDS = 600.0
"""How long W&B may take to start. It starts beside the run."""
CLOSE_SECONDS = 30.0
"""How long a run waits at its end for each backend; W&B sends what it has not sent yet."""

Numbers = Mapping[str, float]
"""Of one step, NaN and inf included."""

_log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes the numbers of each step. Keys look like `train/loss`; values are plain numbers."""

    def __init__(
        self,
        directory: Path,
        *,
        tensorboard: bool,
        wandb_project: str = "",
        config: Any = None,
        keep_bytes: int = 0,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`config`: the run's as nested plain data, shown by W&B. `keep_bytes`: of a `metrics.jsonl` that is there;
        what follows them is cut off when the first line is written: until then the run has not gone on. `warn`: called
        when fewer are there, when lines cannot be written and when they can again, and once, in any thread, for each of
        TensorBoard and W&B that fails."""
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / METRICS
        self._file = JsonLines(self._path)
        self._file.append(b"")  # from now on it is there, and whoever removes it is noticed
        self._keep_bytes: int | None = keep_bytes
        self._unwritten = b""
        self._lock = threading.Lock()  # checkpoints are committed in a thread
        self._warn = warn
        self._backends: list[Backend] = []
        self._tensorboard = directory / "tensorboard" if tensorboard else None
        if wandb_project:
            begin = partial(WeightsAndBiases, directory, project=wandb_project, config=config)
            self._backends.append(Backend("W&B", begin, warn))

    def write(self, step: int, numbers: dict[str, float], *, groups: Sequence[int] = ()) -> None:
        """One step's numbers. NaN and inf are written as null: JSON has no such values. `groups`: that the step
        trained; only in `metrics.jsonl`."""
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

        for backend in self._backends:
            backend.put((step, dict(numbers)))

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
        for backend in self._backends:
            backend.put(None)
        for backend in self._backends:
            backend.wait()

    def _begin(self) -> None:
        """Before the first line: cut off what is not kept."""
        if (keep_bytes := self._keep_bytes) is None:
            return
        self._keep_bytes = None
        if (lost := keep_bytes - self._file.cut(keep_bytes)) > 0:
            self._warn(
                f"{self._path} was changed: {lost:,} of its {keep_bytes:,} bytes are gone, and the steps in them"
            )
        if self._tensorboard is not None:
            begin = partial(TensorBoard, self._tensorboard, self._earlier())
            self._backends.append(Backend("TensorBoard", begin, self._warn))

    def _earlier(self) -> list[tuple[int, Numbers]]:
        """The steps that are in the file; a line that is damaged is left out."""
        steps: list[tuple[int, Numbers]] = []
        for _, numbers in json_lines(self._path):
            step = numbers.pop("step")
            numbers.pop(GROUPS, None)
            steps.append((step, {key: math.nan if value is None else value for key, value in numbers.items()}))
        return steps

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


# --- backends --------------------------------------------------------------------------------------------------------


class TensorBoard:
    """Writes TensorBoard's files; a curve says what its numbers mean. A step takes 3 ms."""

    def __init__(self, directory: Path, earlier: Sequence[tuple[int, Numbers]]) -> None:
        """Writes all files of a run that goes on anew, with its earlier steps: they cannot be cut off at a step."""
        from tensorboard.summary import Writer

        for file in directory.glob("events.out.tfevents.*"):
            file.unlink()
        self._known: set[str] = set()
        self._writer = Writer(str(directory))
        for step in earlier:
            self.show(*step)

    def show(self, step: int, numbers: Numbers) -> None:
        for key, number in numbers.items():
            metric = None if key in self._known else metric_of(key)  # the description of a curve's first number counts
            unit = f" [{metric.unit}]" if metric is not None and metric.unit else ""
            self._known.add(key)
            self._writer.add_scalar(key, number, step, description=metric and f"{metric.meaning}{unit}")

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run of the directory's name, which a resumed run goes on with. `WANDB_MODE` decides where it is kept."""

    def __init__(self, directory: Path, *, project: str, config: Any) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",  # the terminal is the run's, and its lines are in `logs/`
            silent=True,
            # W&B's own bounds, 30 s and 90 s, are too short where a run's start keeps all cores busy
            x_service_wait=START_SECONDS,
            init_timeout=START_SECONDS,
        )
        wandb.setup(settings)
        name = directory.name
        self._run = wandb.init(
            project=project, name=name, id=name, resume="allow", dir=str(directory), config=config, settings=settings
        )

    def show(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Backend(threading.Thread):
    """Begins, shows and closes one library, any call of which may raise or hang.

    put(step) ─▶ queue ─▶ begin ─▶ show, show, … ─▶ close        raises, or the queue is full ─▶ said once, told no more
    """

    def __init__(
        self, name: str, begin: Callable[[], TensorBoard | WeightsAndBiases], warn: Callable[[str], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._begin = begin  # called in the thread
        self._warn = warn  # called from any thread, at most once
        self._steps: queue.Queue[tuple[int, Numbers] | None] = queue.Queue(MOST_WAITING)
        self._over = False
        self.start()

    def put(self, step: tuple[int, Numbers] | None) -> None:
        """Show a step some time; None: close. Never waits."""
        if not self._over:
            try:
                self._steps.put_nowait(step)
            except queue.Full:
                self._give_up(f"is {MOST_WAITING} steps behind")

    def run(self) -> None:
        try:
            library = self._begin()
            while not self._over:
                if (new := self._steps.get()) is None:
                    return library.close()
                library.show(*new)
        except Exception as error:
            _log.warning("%s failed", self.name, exc_info=error)
            self._give_up(f"failed: {type(error).__name__}: {error}")

    def wait(self) -> None:
        """Return when it is closed, but no later than after `CLOSE_SECONDS`."""
        self.join(CLOSE_SECONDS)
        if self.is_alive():
            self._give_up(f"did not close within {CLOSE_SECONDS:g} s")

    def _give_up(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._warn(f"{self.name} {why}; it is told no more, and the run goes on")
