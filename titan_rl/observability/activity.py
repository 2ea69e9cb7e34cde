"""What is going on: spans, from which everything that watches a run is fed.

    with activity("train", step=3, samples=256):                 # shown, timed, watched
        ...
    with activity("trainer", waits_for=buffer.waits_for):        # only watched: waiting is no progress
        ...

A span has a name, the phase of `seconds/…` in the metrics, and ids, which say which of them it is. Spans overlap
freely. The `Watchdog` is here too: who has made no progress for how long, and what the others wait for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class Span:
    """One piece of work, or of waiting, of somebody."""

    name: str
    ids: dict[str, object]
    began: float
    waits_for: Callable[[], str] | None = None
    """What it waits for just now; None: it works, on something that somebody outside may have to finish."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.ids.items())


class Sink(Protocol):
    """Somebody who watches. Called in the thread of the span; must not raise."""

    def began(self, span: Span) -> None: ...

    def ended(self, span: Span) -> None: ...


class Activities:
    """Opens spans and tells every sink of their beginning and end.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, *sinks: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sinks = sinks
        self._clock = clock

    @contextmanager
    def __call__(self, name: str, *, waits_for: Callable[[], str] | None = None, **ids: object) -> Iterator[None]:
        """A span for the length of the block."""
        span = Span(name, ids, self._clock(), waits_for)
        for sink in self._sinks:
            sink.began(span)
        try:
            yield
        finally:
            for sink in self._sinks:
                sink.ended(span)


class PhaseSeconds:
    """A sink: seconds by phase in which at least one span of that name was open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def began(self, span: Span) -> None:
        if span.waits_for is None:
            if not self._open.get(span.name):
                self._since[span.name] = self._clock()
            self._open[span.name] = self._open.get(span.name, 0) + 1

    def ended(self, span: Span) -> None:
        if span.waits_for is None:
            self._open[span.name] -= 1
            if not self._open[span.name]:
                self._count(span.name)

    def take(self) -> dict[str, float]:
        """Seconds since the last call; a phase that is under way counts up to now."""
        for phase, spans in self._open.items():
            if spans:
                self._count(phase)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _count(self, phase: str) -> None:
        now = self._clock()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since[phase]
        self._since[phase] = now


class Watchdog:
    """A sink that is asked now and then whether anything has moved: the beginning or the end of work.

    The report names the span that has worked longest without progress: that is where the others wait. If nobody works,
    everybody waits for somebody else, and the report says so.

    Args:
        seconds: without any progress until there is something to report.
    """

    def __init__(self, *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._open: dict[Span, None] = {}
        self._moved = clock()

    def began(self, span: Span) -> None:
        self._open[span] = None
        if span.waits_for is None:
            self._moved = self._clock()

    def ended(self, span: Span) -> None:
        del self._open[span]
        if span.waits_for is None:
            self._moved = self._clock()

    def report(self) -> str:
        """Who stands still; empty while something has moved within the time."""
        now = self._clock()
        still = now - self._moved
        if still < self._seconds:
            return ""
        longest = next((span for span in self._open if span.waits_for is None), None)
        if longest is None:
            said = ["every task waits for another one"]
        else:
            said = [f"{longest.name} has been at it for {now - longest.began:.0f} s: {longest}"]
        said += [
            f"{span.name} waits for {span.waits_for()} ({now - span.began:.0f} s)"
            for span in self._open
            if span.waits_for is not None
        ]
        return f"nothing has moved for {still:.0f} s. {'; '.join(said)}"

    def report_every(self, seconds: float, on_report: Callable[[str], None]) -> Callable[[], None]:
        """Report every so often, from the running event loop; returns what ends that.

        Args:
            on_report: told when somebody stands still, again at every look for as long as that lasts.
        """
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            if report := self.report():
                on_report(report)
            timer = loop.call_later(seconds, look)

        timer = loop.call_later(seconds, look)
        return lambda: timer.cancel()
