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

from titan_rl.metrics.timeline import Span, Timeline, timeline


class Activities:
    """Opens spans: tells the timeline of them, watches them, and counts the seconds of each phase. `clock`: seconds,
    never going back."""

    def __init__(self, timeline: Timeline = timeline, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeline = timeline
        self.clock = clock
        self._moved = self._counted = clock()  # when work last began or ended; up to when phases are counted
        self.open: dict[Span, None] = {}
        """Spans in the order in which they began."""
        self._phases: Counter[str] = Counter()  # open spans that are work, by name
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, *, waits_for: Callable[[], str] | None = None, **ids: object) -> Iterator[None]:
        span = Span(name, ids, self.clock(), waits_for)
        self.open[span] = None
        self._turn(span, True)
        try:
            yield
        finally:
            del self.open[span]
            self._turn(span, False)

    def _turn(self, span: Span, begins: bool) -> None:
        if span.waits_for is None:
            self._count()
            self._moved = self._counted
            self._phases[span.name] += 1 if begins else -1
        self._timeline.on_span(span, begins)

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase in which at least one of its spans was open, since the last call."""
        self._count()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _count(self) -> None:
        now = self.clock()
        for phase, spans in tuple(self._phases.items()):  # another thread may begin a new phase meanwhile
            if spans:
                self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._counted
        self._counted = now

    def stuck(self, seconds: float) -> str:
        """What the run is stuck in, if no work has begun or ended for `seconds`; else empty. Names the oldest open
        work: that is what the others wait for. If there is none, every task waits for another one."""
        now = self.clock()
        if (still := now - self._moved) < seconds:
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


activity = Activities()
"""Opens spans that only the timeline shows."""
