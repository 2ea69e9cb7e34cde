"""What agents send of their log files and timelines, beside their pulses."""

import queue
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from titan_rl.hosts.agent import News
from titan_rl.processes import start_thread

PULSE_BYTES, MOST_BYTES = 256 << 10, 1 << 20
"""That go with one pulse, and that may wait to be written. The first take a fifth of `placement.host_seconds`, as long
as a pulse may, at a megabit per second; a run's weights and samples need links that are far faster."""


class ShippedLogs:
    """Writes what agents send of their files, in a thread: a disk that stalls keeps nobody from hearing the pulse."""

    def __init__(self, directory: str, on_death: Callable[[str], None]) -> None:
        self._directory = Path(directory)
        self._news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._taken = self._written = 0  # bytes; each counter has one thread
        self._thread = start_thread("shipped logs", self._write, on_death=on_death)

    @property
    def has_room(self) -> bool:
        """Whether more may be asked for."""
        return self._taken - self._written < MOST_BYTES

    def put(self, news: News) -> None:
        """Never waits."""
        self._taken += len(news.text)
        self._news.put(news)

    def close(self, seconds: float) -> None:
        """Wait until all is written, but no longer than this."""
        self._news.put(None)
        self._thread.join(seconds)

    def _write(self) -> None:
        while (news := self._news.get()) is not None:
            with suppress(OSError), open(self._directory / news.of, "ab") as log:
                log.write(news.text)
            self._written += len(news.text)
