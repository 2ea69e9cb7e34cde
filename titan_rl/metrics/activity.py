"""Spans: what a run is doing now. They feed the display, the metrics, the watchdog and the timeline.

    with activity("train", step=3, samples=256):                 # shown, timed, watched
        ...
    with activity("trainer", waits_for=buffer.waits_for):        # only watched: waiting is no progress
        ...

`activity` below feeds the timeline of any process; the controller's spans also feed its numbers, display and watchdog.

A span has a name, which is the phase of `seconds/…` in the metrics, and ids, which tell spans of one name apart. Spans
overlap freely.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from titan_rl.metrics.timeline import Span, timeline


class Sink(Protocol):
    """Told that a span begins or ends, in the thread that does so. Must not raise."""

    def on_span(self, span: Span, begins: bool) -> None: ...


class Activities:
    """Opens spans and tells every sink of their beginning and end. `clock`: seconds, never going back."""

    def __init__(self, *sinks: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sinks = sinks
        self._clock = clock
        self._moved = clock()  # when work last began or ended
        self.open: dict[Span, None] = {}
        """Spans in the order in which they began."""

    @contextmanager
    def __call__(self, name: str, *, waits_for: Callable[[], str] | None = None, **ids: object) -> Iterator[None]:
        span = Span(name, ids, self._clock(), waits_for)
        self.open[span] = None
        self._tell(span, True)
        try:
            yield
        finally:
            del self.open[span]
            self._tell(span, False)

    def _tell(self, span: Span, begins: bool) -> None:
        if span.waits_for is None:
            self._moved = self._clock()
        for sink in self._sinks:
            sink.on_span(span, begins)

    def stuck(self, seconds: float) -> str:
        """What the run is stuck in, if no work has begun or ended for `seconds`; else empty. Names the oldest open
        work: that is what the others wait for. If there is none, every task waits for another one."""
        now = self._clock()
        still = now - self._moved
        if still < seconds:
            return ""
        longest = next((span for span in self.open if span.waits_for is None), None)
        if longest is None:
            said = ["every task waits for another one"]
        else:
            said = [f"{longest.name} has been at it for {now - longest.began:.0f} s: {longest}"]
        said += [
            f"{span.name} waits for {span.waits_for()} ({now - span.began:.0f} s)"
            for span in self.open
            if span.waits_for is not None
        ]
        return f"nothing has moved for {still:.0f} s. {'; '.join(said)}"

    async def watch(self, seconds: float, on_stuck: Callable[[str], None]) -> None:
        """The watchdog: looks every `seconds`, until it is cancelled. `on_stuck`: called with what it finds."""
        while True:
            await asyncio.sleep(seconds)
            if found := self.stuck(seconds):
                on_stuck(found)


activity = Activities(timeline)
"""Opens spans that only the timeline shows."""


class PhaseSeconds:
    """A sink: seconds by phase in which at least one span of that name was open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: Counter[str] = Counter()
        self._since: dict[str, float] = {}  # up to then the phase is counted
        self._seconds: dict[str, float] = {}

    def on_span(self, span: Span, begins: bool) -> None:
        if span.waits_for is None:
            self._count(span.name)
            self._open[span.name] += 1 if begins else -1

    def take(self) -> dict[str, float]:
        """Seconds since the last call; a phase that is under way counts up to now."""
        for phase in self._open:
            self._count(phase)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _count(self, phase: str) -> None:
        now = self._clock()
        if self._open[phase]:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since[phase]
        self._since[phase] = now
