"""The timeline of this process: what it does and for whom it waits, as Chrome trace events in a file of its own.

    {"ph": "M", "name": "process_name", "pid": 71, "args": {"mesh": "generator0", "rank": 0, "host": "host0", …}}
    {"ph": "M", "name": "thread_name", "pid": 71, "tid": 0, "args": {"name": "main"}}
    {"ph": "X", "name": "decode", "pid": 71, "tid": 0, "ts": 1795391318100000, "dur": 12000}
    {"ph": "X", "name": "wait", …, "ts": 1795391318112000, "dur": 4000, "args": {"waits for": "rollouts"}}
    {"ph": "X", "name": "rollout", …, "tid": 3, "ts": 1795391317800000, "dur": 457678, "args": {"group": 7}}

- The lane `main` has no gap: from the birth of the process to the last write every moment has one name. It is the
  thread that does the work: the engine's thread, the trainer's, or else the event loop's.
- Every other lane is the name of its spans. Spans that overlap have a `tid` each, because a thread's spans must nest.
- Times are microseconds of the time of day, as it was when the process was born plus what has passed since. So the
  processes of a host agree, unless somebody sets its clock; hosts agree as well as their clocks do.
- A process that takes another one's place appends to its file, with metadata of its own.
- To record is to append to a list. A thread writes every second: a process that is killed loses one second.
- A file that cannot be written (the disk is full) loses spans. It never stops the run.
"""

import atexit
import logging
import os
import selectors
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.metrics.json_lines import JsonLines, encode_lines
from titan_rl.processes import start_thread

SPANS = "spans"
"""Directory of all timelines of a run."""
MAIN_TID = 0
WAITS_FOR = "waits for"
"""Argument of a span that is a wait."""
WRITE_SECONDS = 1.0
GRAIN_SECONDS, GRAIN_SHARE = 0.005, 1e-5
"""Shorter pieces of the main lane are added up, by name, until they last so long together. Sums stay exact; only the
order inside of a grain is lost. It grows with the age of the process, so a file grows with the logarithm of it."""
LOOK_SHARE = 0.001

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Span:
    """One piece of work, or one wait."""

    name: str
    ids: dict[str, object]
    began: float
    waits_for: Callable[[], str] | None = None
    """Says what the span waits for now; None: the span is work."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.ids.items())


class Uptime(NamedTuple):
    """What the main lane has counted since the process was born."""

    seconds: float = 0.0
    """0: nothing is recorded."""
    waited: float = 0.0
    """Of them."""


class Memory(NamedTuple):
    """Of one process, in bytes."""

    resident: int = 0
    """In RAM; a page that several processes share is a part of each, so that they add up (PSS)."""
    device: int = 0
    """That torch holds on this process's device."""


class MemoryGauge:
    """Memory of this process. The kernel goes over every page, which takes 10 ms and more where torch is: the answer is
    that of the last look, and looks take at most `LOOK_SHARE` of the time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._resident, self._next = 0, 0.0

    def __call__(self) -> Memory:
        if (began := self._clock()) >= self._next:
            rollup = Path("/proc/self/smaps_rollup").read_text()
            self._resident = int(rollup.partition("\nPss:")[2].split()[0]) << 10
            self._next = began + (self._clock() - began) / LOOK_SHARE
        cuda: Any = sys.modules.get("torch.cuda")  # it may be half imported
        in_use = getattr(cuda, "is_initialized", bool)()
        # Only the engine's thread knows which of the devices is this rank's. On the others it holds nothing.
        device = sum(map(cuda.memory_reserved, range(cuda.device_count()))) if in_use else 0
        return Memory(self._resident, device)


memory = MemoryGauge()


class Pulse(NamedTuple):
    """A sign of life of this process."""

    progress: int
    """Grows while it makes progress."""
    uptime: Uptime = Uptime()
    memory: Memory = Memory()


class Piece(NamedTuple):
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
        self._count(now)
        self._doing = (name, waits_for)
        if now - self._since >= max(GRAIN_SECONDS, GRAIN_SHARE * (now - self._born)):
            self._lay_out()

    def cut(self, now: float) -> list[Piece]:
        self._count(now)
        self._lay_out()
        pieces, self._pieces = self._pieces, []
        return pieces

    def uptime(self, now: float) -> Uptime:
        self._count(now)
        return Uptime(now - self._born, self.waited)

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
    """Records one process: its main lane, and every other span that `Activities` opens. Before `begin`, nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # for everything below
        self._lane: MainLane | None = None
        self._pid = 0
        self._epoch = 0.0  # time of day at 0 of the clock
        self._events: list[dict[str, Any]] = []  # metadata and spans that are not written yet
        self._open: dict[Span, tuple[int, str]] = {}  # its tid, and for whom it waits
        self._free: dict[str, list[int]] = {}  # by lane, a heap of the tids without an open span
        self._tids = count(1)
        self._ended = 0.0
        self._over = threading.Event()
        self._writing: threading.Thread | None = None
        self._file = JsonLines(Path())
        self._warned = False
        self._thread = 0  # whose event loop the main lane is
        self._waits_for: Callable[[], str] = str

    # The main lane.

    def doing(self, name: str, waits_for: str = "") -> None:
        """From now on the process does this: it waits for the work of others, or works. Call it in the thread that its
        main lane is."""
        if self._lane is not None:
            with self._lock:
                if self._lane is not None:
                    self._lane.turn(self._clock(), name, waits_for)

    def follow(self, waits_for: Callable[[], str]) -> None:
        """From now on the main lane is the running event loop, which works unless it waits for events. `waits_for`:
        says for whom; it is called with each wait and must be quick."""
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

    def uptime(self) -> Uptime:
        with self._lock:
            return Uptime() if self._lane is None else self._lane.uptime(self._clock())

    # The other lanes.

    def on_span(self, span: Span, begins: bool) -> None:
        if not begins:
            return self._end(span)
        if self._lane is None:
            return
        waits_for = "" if span.waits_for is None else span.waits_for() or "nothing"
        with self._lock:
            free = self._free.setdefault(span.name, [])
            if not free:
                free.append(next(self._tids))
                self._name_thread(free[0], span.name)
            self._open[span] = heappop(free), waits_for

    def _end(self, span: Span) -> None:
        with self._lock:
            if (opened := self._open.pop(span, None)) is not None:
                tid, waits_for = opened
                heappush(self._free[span.name], tid)
                ids = {key: each if type(each) is int else str(each) for key, each in span.ids.items()}
                self._events.append(self._event(span.name, span.began, self._clock(), tid, waits_for, ids))

    # The file.

    def begin(self, directory: Path, mesh: str, *, rank: int = 0, host: str = "host0") -> None:
        """Record from now on, into `directory`. What was before, up to the birth of this process, is its start."""
        born = max(self._ended, _birth())
        self._file = JsonLines(directory / f"{mesh}.{rank}.jsonl")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file.cut()  # the last line of one that was killed
        except OSError as error:
            return _log.warning("no timeline is written: %s", error)
        self._pid = zlib.crc32(f"{host} {os.getpid()}".encode()) >> 1
        self._epoch = time.time() - time.monotonic()
        name = f"{mesh}.{rank} ({host}, pid {os.getpid()})"
        about = {"name": name, "mesh": mesh, "rank": rank, "host": host, "pid": os.getpid()}
        self._events = [{"ph": "M", "name": "process_name", "pid": self._pid, "args": about}]
        self._name_thread(MAIN_TID, "main")
        self.write()
        self._lane = MainLane(born, "start")
        self._over.clear()
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
            self._open.clear()
            self._free.clear()
        atexit.unregister(self.end)

    def write(self) -> None:
        with self._lock:
            pieces = [] if self._lane is None else self._lane.cut(self._clock())
            events, self._events = self._events, []
        for piece in pieces:
            ended = piece.began + piece.seconds
            events.append(self._event(piece.name, piece.began, ended, MAIN_TID, piece.waits_for, {}))
        try:
            self._file.append(encode_lines(events))
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning("a part of the timeline cannot be written, the run goes on without it: %s", error)

    def _write_on(self) -> None:
        while not self._over.wait(WRITE_SECONDS):
            self.write()

    def _event(
        self, name: str, began: float, ended: float, tid: int, waits_for: str, args: dict[str, Any]
    ) -> dict[str, Any]:
        """One span. Both of its ends are rounded, so that neighbours touch and do not overlap."""
        ts, end = (round((self._epoch + moment) * 1e6) for moment in (began, ended))
        event = {"ph": "X", "name": name, "pid": self._pid, "tid": tid, "ts": ts, "dur": end - ts}
        if waits_for:
            args[WAITS_FOR] = waits_for
        return event | {"args": args} if args else event

    def _name_thread(self, tid: int, lane: str) -> None:
        about = {"ph": "M", "name": "thread_name", "pid": self._pid, "tid": tid, "args": {"name": lane}}
        self._events.append(about)


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
