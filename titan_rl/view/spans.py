"""Reads the timelines of a run (`metrics.timeline`), and makes one Perfetto trace of them.

What cannot be read is left out: the last line of a process that was killed, timelines of earlier versions.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.metrics.json_lines import json_lines
from titan_rl.metrics.timeline import MAIN, SPANS, WAITS_FOR

TRACE = "trace.json.gz"

_log = logging.getLogger(__name__)


class RecordedSpan(NamedTuple):
    """One piece of work, or one wait."""

    name: str
    lane: str
    began: float
    """Seconds since the epoch."""
    seconds: float
    waits_for: str = ""
    """Empty: it is work."""
    ids: dict[str, Any] = {}

    @property
    def ended(self) -> float:
        return self.began + self.seconds


@dataclass(slots=True)
class Process:
    """One process, from its birth to its last write."""

    mesh: str
    rank: int
    main: list[RecordedSpan] = field(default_factory=list)
    """In order, without an overlap."""
    others: list[RecordedSpan] = field(default_factory=list)

    @property
    def began(self) -> float:
        return self.main[0].began if self.main else 0.0

    @property
    def ended(self) -> float:
        return max((span.ended for span in (*self.main[-1:], *self.others)), default=0.0)


def read_processes(run: Path) -> list[Process]:
    """All processes of a run, also those that were replaced, in order of their files' names."""
    found: list[Process] = []
    lanes: dict[int, str] = {}
    for event in _events(run):
        with contextlib.suppress(KeyError, TypeError):
            if event["name"] == "process_name":
                about = event["args"]
                found.append(Process(about["mesh"], about["rank"]))
                lanes.clear()
            elif event["name"] == "thread_name" and event["ph"] == "M":
                lanes[event["tid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                lane, ids = lanes[event["tid"]], event.get("args", {})
                waits_for = ids.pop(WAITS_FOR, "")
                span = RecordedSpan(event["name"], lane, event["ts"] / 1e6, event["dur"] / 1e6, waits_for, ids)
                (found[-1].main if lane == MAIN else found[-1].others).append(span)
    return found


def write_trace(run: Path) -> Path | None:
    """Write all timelines as one file for https://ui.perfetto.dev. One that cannot be written stops nothing: returns
    None, and logs why."""
    draft, file = run / f".{TRACE}", run / TRACE
    try:
        with gzip.open(draft, "wt", encoding="utf-8", compresslevel=3) as trace:
            trace.write("[")
            for number, event in enumerate(_events(run)):
                trace.write(f"{',' if number else ''}\n{json.dumps(event)}")
            trace.write("\n]\n")
        return draft.replace(file)
    except OSError as error:
        _log.warning("%s cannot be written: %s", file, error)
        with contextlib.suppress(OSError):
            draft.unlink()
        return None


def _events(run: Path) -> Iterator[dict[str, Any]]:
    for file in sorted((run / SPANS).glob("*.jsonl")):
        yield from (event for _, event in json_lines(file) if "ph" in event)
