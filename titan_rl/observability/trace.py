"""One Perfetto trace of a whole run, in Chrome's JSON format: `RUN/trace.json.gz`, for https://ui.perfetto.dev.

A process is a process there, a lane a thread. Spans of one lane that overlap without one holding the other get rows of
their own, because a thread's spans must nest. Waits have the category `wait`, and say for whom.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_rl.observability.spans import Life, Recorded, read_spans
from titan_rl.observability.timeline import MAIN

TRACE = "trace.json.gz"

_log = logging.getLogger(__name__)


def write_trace(run: Path) -> Path | None:
    """Merge the timelines of a run. A trace that cannot be written stops nothing: returns None, and logs why."""
    draft, file = run / f".{TRACE}", run / TRACE
    try:
        with gzip.open(draft, "wt", encoding="utf-8", compresslevel=3) as trace:
            trace.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for number, event in enumerate(events(read_spans(run))):
                trace.write(f"{',' if number else ''}\n{json.dumps(event)}")
            trace.write("\n]}\n")
        return draft.replace(file)
    except OSError as error:
        _log.warning("%s cannot be written: %s", file, error)
        with contextlib.suppress(OSError):
            draft.unlink()
        return None


def events(lives: Sequence[Life]) -> Iterator[dict[str, Any]]:
    """All events of the trace. Its times are microseconds since the birth of the first process."""
    lives = [life for life in lives if life.main]  # else it was killed before its first write
    begin = min((life.began for life in lives), default=0.0)
    for number, life in enumerate(lives, 1):
        told = {"name": f"{life.process} ({life.host}, pid {life.pid})"}
        yield {"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": told}
        yield {"ph": "M", "pid": number, "tid": 0, "name": "process_sort_index", "args": {"sort_index": number}}
        lanes: dict[str, list[Recorded]] = {MAIN: life.main}
        for span in life.others:
            lanes.setdefault(span.lane, []).append(span)
        thread = 0
        for lane, spans in lanes.items():
            for row in rows(spans):
                thread += 1
                yield {"ph": "M", "pid": number, "tid": thread, "name": "thread_name", "args": {"name": lane}}
                for span in row:
                    yield _event(span, number, thread, begin)


def _event(span: Recorded, process: int, thread: int, begin: float) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "X", "pid": process, "tid": thread, "name": span.name, "cat": "work"}
    event["ts"] = round((span.began - begin) * 1e6, 1)
    event["dur"] = round(max(0.0, span.seconds - _SLACK) * 1e6, 1)  # Perfetto drops spans that overlap by a rounding
    ids = dict(span.ids)
    if span.waits_for:
        event["cat"], ids["waits for"] = "wait", span.waits_for
    if ids:
        event["args"] = ids
    return event


def rows(spans: Iterable[Recorded]) -> list[list[Recorded]]:
    """Spans in as few rows as it takes when each goes into the first row that has room; no two of a row overlap."""
    found: list[list[Recorded]] = []
    ends: list[float] = []  # of each row's last span
    for span in sorted(spans, key=lambda each: each.began):
        free = span.began + _SLACK
        place = next((place for place, ended in enumerate(ends) if ended <= free), len(ends))
        if place == len(ends):
            found.append([])
            ends.append(0.0)
        found[place].append(span)
        ends[place] = span.ended
    return found


_SLACK = 2e-6
"""Seconds. Times are rounded."""
