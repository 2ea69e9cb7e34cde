"""The timeline of this process: what it does and for whom it waits, in a file of its own.

    {"process": "generator0.0", "mesh": "generator0", "rank": 0, "host": "host0", "pid": 7, "epoch": 1795391318.1}
    {"n": "decode", "t": 12.345678, "d": 0.012, "l": "main"}
    {"n": "wait", "t": 12.357678, "d": 0.004, "l": "main", "w": "rollouts"}
    {"n": "rollout", "t": 11.9, "d": 0.457678, "l": "rollout", "a": {"group": 7}}

- The lane `main` has no gap: from the birth of the process to the last write every moment has one name. It is the
  thread that does the work: the engine's thread, the trainer's, or else the event loop's.
- `t` is `time.monotonic()`, `d` is seconds, `w` says for whom it waits, `epoch` is the time of day at monotonic 0. A
  process that takes another one's place appends to its file, with a first line of its own.
- To record is to append to a list. A thread writes every second: a process that is killed loses one second.
- A file that cannot be written (the disk is full) loses spans. It never stops the run.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as _quoted  # a fifth of the time of `json.dumps`
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_rl.observability.memory import Memory
from titan_rl.processes import start_thread

if TYPE_CHECKING:
    from titan_rl.observability.activity import Span

SPANS = "spans"
"""Directory of all timelines of a run."""
MAIN = "main"
WRITE_SECONDS = 1.0
GRAIN_SECONDS, GRAIN_SHARE = 0.005, 1e-5
"""Shorter pieces of the main lane are added up, by name, until they last so long together. Sums stay exact; only the
order inside of a grain is lost. It grows with the age of the process, so a file grows with the logarithm of it."""

_log = logging.getLogger(__name__)


class Lived(NamedTuple):
    """What the main lane has counted since the process was born."""

    seconds: float = 0.0
    """0: nothing is recorded."""
    waited: float = 0.0
    """Of them."""


class Pulse(NamedTuple):
    """A sign of life of this process."""

    progress: int
    """Grows while it makes progress."""
    lived: Lived = Lived()
    memory: Memory = Memory()


class Piece(NamedTuple):
    """A part of the main lane."""

    name: str
    waits_for: str
    """Empty: it is work."""
    began: float
    seconds: float


class MainLane:
    """One thread's life, in pieces without a gap or an overlap. The caller hands in the time, which never goes back."""

    def __init__(self, born: float, name: str) -> None:
        self._born = self._since = self._began = born
        self._doing = (name, "")
        self._short: dict[tuple[str, str], float] = {}  # seconds since `_since`, in order of appearance
        self._pieces: list[Piece] = []
        self.waited = 0.0
        """Seconds, up to the last turn or cut."""

    def turn(self, now: float, name: str, waits_for: str) -> None:
        """From now on it does this."""
        self._count(now)
        self._doing = (name, waits_for)
        if now - self._since >= max(GRAIN_SECONDS, GRAIN_SHARE * (now - self._born)):
            self._lay_out()

    def cut(self, now: float) -> list[Piece]:
        """All pieces up to now that were not taken before."""
        self._count(now)
        self._lay_out()
        pieces, self._pieces = self._pieces, []
        return pieces

    def lived(self, now: float) -> Lived:
        self._count(now)
        return Lived(now - self._born, self.waited)

    def _count(self, now: float) -> None:
        seconds, self._began = now - self._began, now
        self._short[self._doing] = self._short.get(self._doing, 0.0) + seconds
        if self._doing[1]:
            self.waited += seconds

    def _lay_out(self) -> None:
        for (name, waits_for), seconds in self._short.items():
            if seconds > 0:
                self._pieces.append(Piece(name, waits_for, self._since, seconds))
                self._since += seconds
        self._short.clear()
        self._since = self._began


class Timeline:
    """Records one process: its main lane, and as a sink of `Activities` every other span. Before `begin`, nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # for everything below
        self._lane: MainLane | None = None
        self._spans: deque[tuple[Span, float, str]] = deque()
        self._waits: dict[Span, str] = {}
        self._ended = 0.0
        self._over = threading.Event()
        self._writing: threading.Thread | None = None
        self._file = -1
        self._torn = self._said = False
        self._thread = 0  # whose event loop the main lane is
        self._waits_for: Callable[[], str] = str

    # The main lane.

    def doing(self, name: str, waits_for: str = "") -> None:
        """From now on the process does this. Call it in the thread that its main lane is.

        Args:
            waits_for: the others whose work it needs to go on; empty: it works.
        """
        if self._lane is not None:
            with self._lock:
                if self._lane is not None:
                    self._lane.turn(self._clock(), name, waits_for)

    def follow(self, waits_for: Callable[[], str]) -> None:
        """From now on the main lane is the running event loop, which works unless it waits for events.

        Args:
            waits_for: says for whom; it is called with each wait and must be quick.
        """
        self._waits_for = waits_for
        self._thread = threading.get_ident()
        self.doing("events")

    def select(self, wait: Callable[[], Any]) -> Any:
        """Called by every event loop: the result of `wait`."""
        if self._lane is None or self._thread != threading.get_ident():
            return wait()
        self.doing("wait", self._waits_for())
        try:
            return wait()
        finally:
            self.doing("events")

    def lived(self) -> Lived:
        with self._lock:
            return Lived() if self._lane is None else self._lane.lived(self._clock())

    # The other lanes.

    def began(self, span: Span) -> None:
        if span.waits_for is not None and self._lane is not None:
            self._waits[span] = span.waits_for()

    def ended(self, span: Span) -> None:
        if self._lane is not None:
            self._spans.append((span, self._clock(), self._waits.pop(span, "")))

    # The file.

    def begin(self, directory: Path, mesh: str, *, rank: int = 0, host: str = "host0") -> None:
        """Record from now on, into `directory`. What was before, up to the birth of this process, is its start."""
        born = max(self._ended, _birth())
        about = {"process": f"{mesh}.{rank}", "mesh": mesh, "rank": rank, "host": host, "pid": os.getpid()}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(directory / f"{mesh}.{rank}.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self._file).st_size
            self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"  # of one that was killed
        except OSError as error:
            return _log.warning("no timeline is written: %s", error)
        self._lane = MainLane(born, "start")
        self._over.clear()
        self._put([json.dumps(about | {"epoch": round(time.time() - time.monotonic(), 6)})])
        self._writing = start_thread("timeline", self._write_on, on_death=_log.warning)
        atexit.register(self.end)

    @property
    def is_on(self) -> bool:
        return self._lane is not None

    def end(self) -> None:
        """Write what is left; nothing is recorded any more."""
        if self._writing is None:
            return
        self._over.set()
        self._writing.join()
        self.write()
        with self._lock:
            self._lane = self._writing = None
            self._ended = self._clock()
        self._spans.clear()
        self._waits.clear()
        os.close(self._file)
        atexit.unregister(self.end)

    def write(self) -> None:
        """Write everything up to now."""
        with self._lock:
            pieces = [] if self._lane is None else self._lane.cut(self._clock())
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        self._put([*map(_line_of_piece, pieces), *(_line_of_span(*each) for each in spans)])

    def _write_on(self) -> None:
        while not self._over.wait(WRITE_SECONDS):
            self.write()

    def _put(self, lines: list[str]) -> None:
        text = ("\n" * self._torn + "".join(f"{line}\n" for line in lines)).encode()
        try:
            self._torn = os.write(self._file, text) < len(text)
        except OSError as error:
            if not self._said:
                self._said = True
                _log.warning("a part of the timeline cannot be written, the run goes on without it: %s", error)


def _line_of_piece(piece: Piece) -> str:
    waits = f', "w": {_quoted(piece.waits_for)}' if piece.waits_for else ""
    return f'{{"n": {_quoted(piece.name)}, "t": {piece.began:.6f}, "d": {piece.seconds:.6f}, "l": "{MAIN}"{waits}}}'


def _line_of_span(span: Span, ended: float, waits_for: str) -> str:
    name = _quoted(span.name)
    line = f'{{"n": {name}, "t": {span.began:.6f}, "d": {ended - span.began:.6f}, "l": {name}'
    if span.waits_for is not None:
        line += f', "w": {_quoted(waits_for or "nothing")}'
    if span.ids:
        ids = (f"{_quoted(key)}: {each if type(each) is int else _quoted(str(each))}" for key, each in span.ids.items())
        line += f', "a": {{{", ".join(ids)}}}'
    return f"{line}}}"


def _birth() -> float:
    """Of this process, on the clock of `time.monotonic`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


class WatchedSelector(selectors.DefaultSelector):
    """Of an event loop that may be the main lane."""

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout <= 0:  # callbacks are ready: it does not wait
            return super().select(timeout)
        return timeline.select(lambda: super(WatchedSelector, self).select(timeout))


timeline = Timeline()
"""Of this process."""
