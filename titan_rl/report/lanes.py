"""What every mesh did over the run's time: per bin of time, the share of each kind of work and of each wait.

    generator0    |decode 0.9, pull 0.1|decode 1.0|waits for rollouts 0.8, decode 0.2|

A lane is a mesh: the mean over its ranks. Its size depends on the number of bins, never on the length of the run; every
single span is in RUN/trace.json.gz. Idle shares are of the time from the first step's beginning to the last one's end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from titan_rl.observability.bubbles import Account, find_bubbles, steps_of
from titan_rl.observability.spans import Life, read_spans

BINS = 480
STEPS, WHOLE = "steps", "whole run"

Kind = tuple[str, str]
"""Name of the work and "", or "" and for whom it waits."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One mesh."""

    mesh: str
    ranks: int
    shares: dict[Kind, list[float]] = field(default_factory=dict)
    """[BINS] each."""
    account: Account | None = None
    """How it spent the steps; None: there are none."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """All meshes in one window of time."""

    window: str
    """STEPS or WHOLE."""
    start: float
    """Seconds since the run's first process was born."""
    seconds: float
    lanes: list[Lane]


def read_timelines(run: Path) -> list[Timeline]:
    """Of the steps, if there are any, and of the whole run; none where there are no spans."""
    lives: list[Life] = []
    with contextlib.suppress(OSError):
        lives = [life for life in read_spans(run) if life.main]
    if not lives:
        return []
    born, end = min(life.began for life in lives), max(life.ended for life in lives)
    windows = [(WHOLE, born, end)]
    accounts: list[Account] = []
    if steps := steps_of(lives):
        accounts = find_bubbles(lives)
        windows.insert(0, (STEPS, steps[0].began, max(step.ended for step in steps)))
    of = {account.mesh: account for account in accounts}
    meshes = {
        mesh: [life for life in lives if life.mesh == mesh] for mesh in (*of, *sorted(life.mesh for life in lives))
    }
    timelines = []
    for window, first, last in windows:
        edges = np.linspace(first, max(last, first + 1e-9), BINS + 1)
        lanes = [_lane(mesh, some, edges, of.get(mesh)) for mesh, some in meshes.items()]
        timelines.append(Timeline(window, first - born, last - first, lanes))
    return timelines


def _lane(mesh: str, lives: Sequence[Life], edges: np.ndarray, account: Account | None) -> Lane:
    ranks = len({life.rank for life in lives})
    pieces: dict[Kind, list[tuple[float, float]]] = {}
    shares: dict[Kind, np.ndarray] = {}
    for life in lives:
        pieces.clear()
        for span in life.main:
            kind = ("", span.waits_for) if span.waits_for else (span.name, "")
            pieces.setdefault(kind, []).append((span.began, span.ended))
        for kind, spans in pieces.items():
            moments = np.maximum.accumulate(np.array(spans).ravel())  # [2n] began, ended, began, ended, …
            done = np.repeat(np.cumsum([0.0, *np.diff(moments)[::2]]), 2)[1:-1]  # [2n] seconds at those moments
            bins = np.diff(np.interp(edges, moments, done)) / (np.diff(edges) * ranks)
            shares[kind] = shares.get(kind, 0.0) + bins
    longest = sorted(shares, key=lambda kind: (bool(kind[1]), -shares[kind].sum()))
    return Lane(mesh, ranks, {kind: shares[kind].tolist() for kind in longest if shares[kind].any()}, account)
