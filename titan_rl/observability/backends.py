"""TensorBoard and W&B, each in a thread of its own: one that fails, or hangs, costs the run nothing but its picture.

put(step) ─▶ queue ─▶ begin ─▶ show, show, … ─▶ close        raises, or the queue is full ─▶ said once, told no more
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from titan_rl.observability.metric_table import metric_of

MOST_WAITING = 1000
"""Steps that a backend may be behind. One that is further behind hangs."""
CLOSE_SECONDS = 30.0
"""How long a run waits at its end for all backends together; W&B sends what it has not sent yet."""

_log = logging.getLogger(__name__)


class Step(NamedTuple):
    """The numbers of one step, NaN and inf included."""

    step: int
    numbers: Mapping[str, float]


class Shows(Protocol):
    """A library that shows numbers. Any method may raise."""

    def show(self, step: Step) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes TensorBoard's files. A step is one event, and a curve says what its numbers mean in its first one:
    TensorBoard's own `Writer` takes 8 ms for a step, because its checksum is plain Python."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
        from tensorboard.compat.proto.types_pb2 import DT_FLOAT
        from tensorboard.plugins.scalar.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._float, self._scalar, self._about = (
            Event,
            DT_FLOAT,
            DATA_CLASS_SCALAR,
            create_summary_metadata,
        )
        self._known: set[str] = set()
        self._writer = EventFileWriter(str(directory))

    def show(self, step: Step) -> None:
        event = self._event(wall_time=time.time(), step=step.step)
        for key, number in step.numbers.items():
            value = event.summary.value.add(tag=key)
            value.tensor.dtype = self._float
            value.tensor.float_val.append(number)
            if key not in self._known:
                self._known.add(key)
                value.metadata.CopyFrom(self._about(None, _described(key)))
                value.metadata.data_class = self._scalar
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run of the same name, which a resumed run goes on with. `WANDB_MODE` decides where it is kept."""

    def __init__(self, directory: Path, *, project: str, name: str, config: Any) -> None:
        import wandb

        quiet = wandb.Settings(console="off", silent=True)  # the terminal is the run's, and its lines are in `logs/`
        self._run = wandb.init(
            project=project, name=name, id=name, resume="allow", dir=str(directory), config=config, settings=quiet
        )

    def show(self, step: Step) -> None:
        self._run.log(dict(step.numbers), step=step.step)

    def close(self) -> None:
        self._run.finish()


class Backend(threading.Thread):
    """Begins, shows and closes one library."""

    def __init__(
        self, name: str, begin: Callable[[], Shows], say: Callable[[str], None], before: Sequence[Step] = ()
    ) -> None:
        """
        Args:
            begin: called in the thread.
            say: called from any thread, at most once.
            before: what it shows first.
        """
        super().__init__(name=name, daemon=True)
        self._begin = begin
        self._say = say
        self._before = before
        self._steps: queue.Queue[Step | None] = queue.Queue(MOST_WAITING)
        self._over = False
        self.start()

    def put(self, step: Step | None) -> None:
        """Show a step some time; None: close. Never waits."""
        if not self._over:
            try:
                self._steps.put_nowait(step)
            except queue.Full:
                self._give_up(f"is {MOST_WAITING} steps behind")

    def run(self) -> None:
        try:
            library = self._begin()
            for step in self._before:
                library.show(step)
            while not self._over:
                if (new := self._steps.get()) is None:
                    return library.close()
                library.show(new)
        except Exception as error:
            _log.warning("%s failed", self.name, exc_info=error)
            self._give_up(f"failed: {type(error).__name__}: {error}")

    def wait(self, seconds: float) -> None:
        """Return when it is closed, but no later than this."""
        self.join(seconds)
        if self.is_alive():
            self._give_up(f"did not close within {CLOSE_SECONDS:g} s")

    def _give_up(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._say(f"{self.name} {why}; it is told no more, and the run goes on")


def close_all(backends: Sequence[Backend], clock: Callable[[], float] = time.monotonic) -> None:
    """Close them side by side, within `CLOSE_SECONDS`."""
    end = clock() + CLOSE_SECONDS
    for backend in backends:
        backend.put(None)
    for backend in backends:
        backend.wait(max(0.0, end - clock()))


def _described(key: str) -> str:
    metric = metric_of(key)
    return "" if metric is None else f"{metric.meaning} [{metric.unit}]" if metric.unit else metric.meaning
