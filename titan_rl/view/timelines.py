"""Reads the timelines of a run, and says what every mesh did and for whom it waited.

    generator0    |decode 0.9, pull 0.1|decode 1.0|waits for rollouts 0.8, decode 0.2|    a lane: shares per bin of time

- What cannot be read is left out: the last line of a process that was killed, timelines of earlier versions.
- A lane is a mesh: the mean over its ranks. Its size depends on the number of bins, never on the length of the run;
  every single span is in RUN/spans.
- Every moment of every rank is work, a wait, or the time without a process. So the shares of a mesh add up to 1.
- If A waits for B, and all of B waits for C, then A waits for C (`metrics/README.md`).
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli

from titan_rl.metrics.json_lines import json_lines
from titan_rl.metrics.timeline import MAIN_TID, SPANS, WAITS_FOR

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
HINTS: dict[str, dict[str, Any]] = _WAITS["hints"]
"""By kind of the mesh that waits, and for whom: what makes it wait less, as in the table of metrics."""

_ROUNDING = 1e-5
"""Seconds that rounding may leave between two pieces of a main lane."""


# --- files -----------------------------------------------------------------------------------------------------------


class RecordedSpan(NamedTuple):
    name: str
    began: float
    """Seconds since the epoch."""
    seconds: float
    waits_for: str = ""
    """Empty: it is work."""
    ids: dict[str, Any] = {}

    @property
    def ended(self) -> float:
        return self.began + self.seconds

    @property
    def kind(self) -> tuple[str, str]:
        """The name of the work and "", or "" and for whom it waits."""
        return ("", self.waits_for) if self.waits_for else (self.name, "")


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
    files = sorted((run / SPANS).glob("*.jsonl"))
    for event in (event for file in files for _, event in json_lines(file) if "ph" in event):
        with contextlib.suppress(LookupError, TypeError):
            if event["name"] == "process_name" and event["ph"] == "M":
                about = event["args"]
                found.append(Process(about["mesh"], about["rank"]))
            elif event["ph"] == "X":
                ids = event.get("args", {})
                waits_for = ids.pop(WAITS_FOR, "")
                span = RecordedSpan(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, waits_for, ids)
                (found[-1].main if event["tid"] == MAIN_TID else found[-1].others).append(span)
    return found


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
    return sorted((span for span in spans if span.name == "train"), key=lambda span: span.began)


def idle_accounts(processes: Sequence[Process]) -> list[Account]:
    """How all meshes spent the time of the steps; empty if there is no step."""
    parts = [steps for process in processes if (steps := steps_of([process]))]
    windows = [(steps[0].began, max(step.ended for step in steps)) for steps in parts]
    return accounts(processes, *windows) if windows else []


def accounts(processes: Sequence[Process], *windows: tuple[float, float]) -> list[Account]:
    """How every mesh spent some windows of time, from one moment to another each, that do not overlap."""
    edges = [moment for window in sorted(windows) for moment in window]
    whole = max(sum(last - first for first, last in windows), 1e-9)
    found = []
    for mesh, (ranks, spent) in _spent(processes, edges, resolve=True).items():
        shares = [(waits_for, float(seconds[::2].sum()) / whole) for (_, waits_for), seconds in spent.items()]
        waits = {label: share for label, share in sorted(shares, key=lambda each: -each[1]) if label and share > 0}
        found.append(Account(mesh, ranks, sum(share for label, share in shares if not label), waits))
    return sorted(found, key=lambda each: (ORDER.index(each.kind) if each.kind in ORDER else len(ORDER), each.mesh))


Spent = dict[tuple[str, str], np.ndarray]
"""By `RecordedSpan.kind`, [len(edges) - 1] seconds between every two edges."""


def _spent(
    processes: Sequence[Process], edges: Sequence[float] | np.ndarray, *, resolve: bool = False
) -> dict[str, tuple[int, Spent]]:
    """By mesh: its ranks, and how they spent the time, on average. `resolve`: where one waits for others that all wait,
    it waits for what the first of them waits for."""
    ranks: dict[tuple[str, int], list[RecordedSpan]] = {}
    for process in processes:
        ranks.setdefault((process.mesh, process.rank), []).extend(process.main)
    kinds = dict.fromkeys([("", GONE), *(span.kind for spans in ranks.values() for span in spans)])
    codes = {kind: code for code, kind in enumerate(kinds)}
    moments = [moment for spans in ranks.values() for span in spans for moment in (span.began, span.ended)]
    grid = np.union1d(edges, np.clip(np.array(moments), edges[0], edges[-1]))  # between two, no state changes
    if len(grid) > MOST_CELLS:
        grid = np.union1d(edges, np.linspace(edges[0], edges[-1], MOST_CELLS))
    middles = (grid[:-1] + grid[1:]) / 2
    states = {rank: _states(spans, middles, codes) for rank, spans in ranks.items()}
    if resolve:
        waits = np.array([bool(waits_for) for _, waits_for in kinds])
        players = [state for (mesh, _), state in sorted(states.items()) if mesh.startswith("rollout")]
        for (mesh, rank), mine in states.items():
            if rank and (mesh, 0) in states:
                _resolve(mine, codes.get(("", RANK_0), -1), [states[mesh, 0]], waits)
            if players and not mesh.startswith("rollout"):
                _resolve(mine, codes.get(("", ROLLOUTS), -1), players, waits)
    found: dict[str, list[np.ndarray]] = {}
    bins = np.searchsorted(edges, middles, side="right") - 1
    shape = len(kinds), len(edges) - 1
    for (mesh, _), state in states.items():
        seconds = np.bincount(state * shape[1] + bins, weights=np.diff(grid), minlength=math.prod(shape))
        found.setdefault(mesh, []).append(seconds.reshape(shape))
    return {mesh: (len(each), dict(zip(kinds, np.mean(each, axis=0), strict=True))) for mesh, each in found.items()}


def _states(spans: Sequence[RecordedSpan], middles: np.ndarray, codes: dict[tuple[str, str], int]) -> np.ndarray:
    """[K] int64, the code of what one rank does in each cell."""
    spans = sorted(spans, key=lambda span: span.began) or [RecordedSpan("", math.inf, 0.0, GONE)]
    ended, code = np.array([span.ended for span in spans]), np.array([codes[span.kind] for span in spans])
    at = np.searchsorted([span.began for span in spans], middles, side="right") - 1
    return np.where((at >= 0) & (middles <= ended[at] + _ROUNDING), code[at], codes["", GONE])


def _resolve(mine: np.ndarray, label: int, others: Sequence[np.ndarray], waits: np.ndarray) -> None:
    at = (mine == label) & np.all([waits[other] for other in others], axis=0)
    mine[at] = others[0][at]


# --- lanes -----------------------------------------------------------------------------------------------------------


def read_timelines(run: Path) -> list[Timeline]:
    """Of the steps, if there are any, and of the whole run; none where there are no spans."""
    processes = [process for process in read_processes(run) if process.main]
    if not processes:
        return []
    born, end = min(process.began for process in processes), max(process.ended for process in processes)
    windows = [(WHOLE, born, end)]
    if steps := steps_of(processes):
        windows.insert(0, (STEPS, steps[0].began, max(step.ended for step in steps)))
    of = {account.mesh: account for account in idle_accounts(processes)}
    meshes = dict.fromkeys((*of, *sorted(process.mesh for process in processes)))
    timelines = []
    for window, first, last in windows:
        spent = _spent(processes, np.linspace(first, max(last, first + 1e-9), BINS + 1))
        lanes = [_lane(mesh, *spent[mesh], of.get(mesh), max(last - first, 1e-9)) for mesh in meshes]
        timelines.append(Timeline(window, first - born, last - first, lanes))
    return timelines


def _lane(mesh: str, ranks: int, spent: Spent, account: Account | None, seconds: float) -> Lane:
    found = [(kind, each / seconds) for kind, each in spent.items() if kind != ("", GONE) and each.any()]
    longest = sorted(found, key=lambda each: (bool(each[0][1]), -each[1].sum()))
    kinds = [LaneKind(*kind, float(each.sum()), np.round(each * BINS, 3).tolist()) for kind, each in longest]
    return Lane(mesh, ranks, kinds, account)
