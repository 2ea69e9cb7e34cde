"""What every mesh did over the run's time, from RUN/spans: per bin of time, the share that each kind of span took.

    generator_0    |decode 0.9, pull 0.1|decode 1.0|waits for trainer 0.8, decode 0.2|

A lane is a mesh: the mean over its processes. Its size depends on the number of bins, never on the length of the run;
every single span is in RUN/trace.json.gz.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.report.jsonl import json_lines

BINS = 480
MAIN = "main"
"""The lane of a process in which every moment of its life has a name."""


@dataclass(slots=True)
class Lane:
    """One mesh."""

    mesh: str
    processes: int = 0
    seconds: float = 0.0
    """That its processes lived, together."""
    shares: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """(span, for whom it waits or "") → [BINS] share of each bin."""
    totals: dict[tuple[str, str], float] = field(default_factory=dict)
    """The same, in seconds of the whole run."""

    @property
    def idle(self) -> float:
        """Share of its time in which it waited for another part."""
        waited = sum(seconds for (_, waits_for), seconds in self.totals.items() if waits_for)
        return waited / self.seconds if self.seconds else 0.0

    @property
    def waits_for(self) -> str:
        """For whom it waited longest; empty: for nobody."""
        waits: dict[str, float] = {}
        for (_, waits_for), seconds in self.totals.items():
            if waits_for:
                waits[waits_for] = waits.get(waits_for, 0.0) + seconds
        return max(waits, key=lambda each: waits[each], default="")


@dataclass(frozen=True, slots=True)
class Timeline:
    seconds: float
    lanes: list[Lane]


def read_timeline(directory: Path) -> Timeline | None:
    """None: there are no spans."""
    extents = [extent for path in sorted(directory.glob("*.jsonl")) if (extent := _extent(path)) is not None]
    if not extents:
        return None
    start = min(begin for _, begin, _ in extents)
    seconds = max(max(end for _, _, end in extents) - start, 1e-9)
    lanes: dict[str, Lane] = {}
    for path, begin, end in extents:
        header, *spans = _lines(path)
        mesh = str(header["mesh"])
        lane = lanes.setdefault(mesh, Lane(mesh))
        lane.processes += 1
        lane.seconds += end - begin
        for span in spans:
            if span.get("l") == MAIN:
                _add(lane, span, float(header["epoch"]) - start, seconds)
    for lane in lanes.values():
        width = seconds / BINS * lane.processes
        for kind, bins in lane.shares.items():
            lane.shares[kind] = [spent / width for spent in bins]
    return Timeline(seconds, [lanes[mesh] for mesh in sorted(lanes, key=_natural)])


def _add(lane: Lane, span: dict[str, Any], shift: float, seconds: float) -> None:
    """Spread a span over the bins that it touches."""
    kind = (str(span["n"]), str(span.get("w") or ""))
    bins = lane.shares.setdefault(kind, [0.0] * BINS)
    lane.totals[kind] = lane.totals.get(kind, 0.0) + float(span["d"])
    begin = (float(span["t"]) + shift) / seconds * BINS
    end = begin + float(span["d"]) / seconds * BINS
    for number in range(max(0, int(begin)), min(BINS, int(end) + 1)):
        bins[number] += max(0.0, min(end, number + 1) - max(begin, number)) * seconds / BINS


def _extent(path: Path) -> tuple[Path, float, float] | None:
    """When the process of a file began and ended, in wall-clock seconds; None: it says nothing."""
    lines = _lines(path)
    if (header := next(lines, None)) is None or not {"mesh", "epoch"} <= header.keys():
        return None
    moments = [(float(span["t"]), float(span["t"]) + float(span["d"])) for span in lines if span.get("l") == MAIN]
    if not moments:
        return None
    epoch = float(header["epoch"])
    return path, epoch + min(moments)[0], epoch + max(end for _, end in moments)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from (line for _, line in json_lines(path))


def _natural(mesh: str) -> tuple[int, str, int]:
    """Controller, trainer, router, generators, rollout workers, the rest."""
    name = mesh.rstrip("0123456789").rstrip("_")
    order = ("controller", "trainer", "router", "generator", "rollout")
    number = mesh[len(mesh.rstrip("0123456789")) :]
    return (order.index(name) if name in order else len(order)), name, int(number or 0)
