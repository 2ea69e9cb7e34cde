"""Reads the timelines of a run, makes one Perfetto trace of them, and says what every mesh did and for whom it waited.

    generator0    |decode 0.9, pull 0.1|decode 1.0|waits for rollouts 0.8, decode 0.2|    a lane: shares per bin of time

- What cannot be read is left out: the last line of a process that was killed, timelines of earlier versions.
- A lane is a mesh: the mean over its ranks. Its size depends on the number of bins, never on the length of the run;
  every single span is in RUN/trace.json.gz.
- Every moment of every rank is work, a wait, or the time without a process. So the shares of a mesh add up to 1.
- If A waits for B, and all of B waits for C, then A waits for C (`metrics/README.md`).
"""

import contextlib
import gzip
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli

from titan_rl.metrics.json_lines import json_lines
from titan_rl.metrics.timeline import MAIN, SPANS, WAITS_FOR

TRACE = "trace.json.gz"
BINS = 480
"""Of a lane."""
STEPS, WHOLE = "steps", "whole run"

ROLLOUTS, RANK_0, SLOTS, GONE = "rollouts", "rank 0", "slots", "its restart"
"""Labels of waits: the rollout workers; the first rank of the same mesh; room for one more group; a process."""

ORDER = ("trainer", "generator", "rollout", "gateway", "router", "relay", "controller")
COMPUTE = ("trainer", "generator")
"""Kinds of meshes whose devices cost something."""

MOST_CELLS = 500_000
"""Beyond so many changes of anybody's state, the window is cut into so many equal cells."""

_WAITS = tomli.loads(Path(__file__).with_name("waits.toml").read_text(encoding="utf-8"))
MEANINGS: dict[str, str] = _WAITS["meanings"]
HINTS: dict[str, dict[str, str]] = _WAITS["hints"]
"""By kind of the mesh that waits, and for whom: what makes it wait less."""

_ROUNDING = 1e-5
"""Seconds that rounding may leave between two pieces of a main lane."""
_log = logging.getLogger(__name__)


# --- files -----------------------------------------------------------------------------------------------------------


class RecordedSpan(NamedTuple):
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


# --- who waits for whom ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Account:
    """How one mesh spent the window, averaged over its ranks."""

    mesh: str
    ranks: int
    busy: float
    """A share of the window, like all that follow."""
    waits: dict[str, float]
    """By for whom, the longest first."""

    @property
    def kind(self) -> str:
        return self.mesh.rstrip("0123456789")

    @property
    def idle(self) -> float:
        return sum(self.waits.values())


@dataclass(frozen=True, slots=True)
class LaneKind:
    """One kind of work of a lane, or one kind of wait."""

    name: str
    """Of the work; empty: it is a wait."""
    waits_for: str
    share: float
    """Of the whole window."""
    shares: list[float]
    """[BINS]"""


@dataclass(frozen=True, slots=True)
class Lane:
    mesh: str
    ranks: int
    kinds: list[LaneKind] = field(default_factory=list)
    """Work first, the longest of each first."""
    account: Account | None = None
    """How it spent the steps; None: there are none."""


@dataclass(frozen=True, slots=True)
class Timeline:
    window: str
    """STEPS or WHOLE."""
    start: float
    """Seconds since the run's first process was born."""
    seconds: float
    lanes: list[Lane]


def steps_of(processes: Sequence[Process]) -> list[RecordedSpan]:
    spans = (span for process in processes if process.mesh == "controller" for span in process.others)
    return sorted((span for span in spans if span.lane == "train"), key=lambda span: span.began)


def idle_accounts(processes: Sequence[Process]) -> list[Account]:
    """How all meshes spent the time of the steps; empty if there is no step."""
    parts = [steps for process in processes if (steps := steps_of([process]))]
    windows = [(steps[0].began, max(step.ended for step in steps)) for steps in parts]
    return accounts(processes, *windows) if windows else []


def accounts(processes: Sequence[Process], *windows: tuple[float, float]) -> list[Account]:
    """How every mesh spent some windows of time, from one moment to another each, that do not overlap."""
    ranks: dict[tuple[str, int], list[RecordedSpan]] = {}
    for process in processes:
        ranks.setdefault((process.mesh, process.rank), []).extend(process.main)
    labels = ["", GONE, *sorted({span.waits_for for spans in ranks.values() for span in spans if span.waits_for})]
    codes = {label: code for code, label in enumerate(labels)}
    grids = [_grid(ranks.values(), *window) for window in windows]
    middles = np.concatenate([(grid[:-1] + grid[1:]) / 2 for grid in grids])
    seconds = np.concatenate([np.diff(grid) for grid in grids])
    states = {
        rank: _states(sorted(spans, key=lambda span: span.began), middles, codes) for rank, spans in ranks.items()
    }

    for (mesh, rank), mine in states.items():
        if rank and RANK_0 in codes and (mesh, 0) in states:
            _resolve(mine, codes[RANK_0], [states[mesh, 0]])
    players = [state for (mesh, _), state in sorted(states.items()) if mesh.startswith("rollout")]
    if ROLLOUTS in codes and players:
        for (mesh, _), mine in states.items():
            if not mesh.startswith("rollout"):
                _resolve(mine, codes[ROLLOUTS], players)

    found: dict[str, list[np.ndarray]] = {}
    for (mesh, _), state in states.items():
        found.setdefault(mesh, []).append(np.bincount(state, weights=seconds, minlength=len(labels)))
    meshes = []
    for mesh, each in found.items():
        shares = np.mean(each, axis=0) / max(seconds.sum(), 1e-9)
        waits = {label: float(share) for label, share in zip(labels[1:], shares[1:], strict=True) if share > 0}
        by_length = dict(sorted(waits.items(), key=lambda item: -item[1]))
        meshes.append(Account(mesh, len(each), float(shares[0]), by_length))
    return sorted(meshes, key=lambda each: (ORDER.index(each.kind) if each.kind in ORDER else len(ORDER), each.mesh))


def _grid(ranks: Collection[Sequence[RecordedSpan]], first: float, last: float) -> np.ndarray:
    """[K + 1] times between which no state changes, the window's edges first and last."""
    moments = [moment for spans in ranks for span in spans for moment in (span.began, span.ended)]
    inside = np.unique(np.clip(np.array([first, last, *moments]), first, last))
    return inside if len(inside) <= MOST_CELLS else np.linspace(first, last, MOST_CELLS + 1)


def _states(spans: Sequence[RecordedSpan], middles: np.ndarray, codes: dict[str, int]) -> np.ndarray:
    """[K] int64, the code of what one rank does in each cell; 0 is work."""
    if not spans:
        return np.full(len(middles), codes[GONE])
    began = np.array([span.began for span in spans])
    ended = np.array([span.ended for span in spans])
    code = np.array([codes[span.waits_for] for span in spans])
    at = np.searchsorted(began, middles, side="right") - 1
    inside = (at >= 0) & (middles <= ended[at] + _ROUNDING)
    return np.where(inside, code[at], codes[GONE])


def _resolve(mine: np.ndarray, label: int, others: Sequence[np.ndarray]) -> None:
    """Where one waits for others that all wait, it waits for what the first of them waits for."""
    all_wait = np.all([other > 0 for other in others], axis=0)
    at = (mine == label) & all_wait
    mine[at] = others[0][at]


# --- lanes -----------------------------------------------------------------------------------------------------------


def read_timelines(run: Path) -> list[Timeline]:
    """Of the steps, if there are any, and of the whole run; none where there are no spans."""
    processes = [process for process in read_processes(run) if process.main]
    if not processes:
        return []
    born, end = min(process.began for process in processes), max(process.ended for process in processes)
    windows = [(WHOLE, born, end)]
    accounts: list[Account] = []
    if steps := steps_of(processes):
        accounts = idle_accounts(processes)
        windows.insert(0, (STEPS, steps[0].began, max(step.ended for step in steps)))
    of = {account.mesh: account for account in accounts}
    names = dict.fromkeys((*of, *sorted(process.mesh for process in processes)))
    meshes = {name: [process for process in processes if process.mesh == name] for name in names}
    timelines = []
    for window, first, last in windows:
        edges = np.linspace(first, max(last, first + 1e-9), BINS + 1)
        lanes = [_lane(mesh, some, edges, of.get(mesh)) for mesh, some in meshes.items()]
        timelines.append(Timeline(window, first - born, last - first, lanes))
    return timelines


def _lane(mesh: str, processes: Sequence[Process], edges: np.ndarray, account: Account | None) -> Lane:
    ranks = len({process.rank for process in processes})
    pieces: dict[tuple[str, str], list[tuple[float, float]]] = {}
    shares: dict[tuple[str, str], np.ndarray] = {}
    for process in processes:
        pieces.clear()
        for span in process.main:
            kind = ("", span.waits_for) if span.waits_for else (span.name, "")
            pieces.setdefault(kind, []).append((span.began, span.ended))
        for kind, spans in pieces.items():
            moments = np.maximum.accumulate(np.array(spans).ravel())  # [2n] began, ended, began, ended, …
            done = np.repeat(np.cumsum([0.0, *np.diff(moments)[::2]]), 2)[1:-1]  # [2n] seconds at those moments
            bins = np.diff(np.interp(edges, moments, done)) / (np.diff(edges) * ranks)
            shares[kind] = shares.get(kind, 0.0) + bins
    longest = sorted(shares, key=lambda kind: (bool(kind[1]), -shares[kind].sum()))
    some = [(kind, shares[kind]) for kind in longest if shares[kind].any()]
    kinds = [LaneKind(*kind, float(each.mean()), np.round(each, 3).tolist()) for kind, each in some]
    return Lane(mesh, ranks, kinds, account)
