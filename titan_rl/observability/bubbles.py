"""Which mesh waited for whom, and for how long, from the beginning of a run's first step to the end of its last. The
time between the end of a run and its resumption, up to its next step, is not counted.

- Every moment of every rank is work, a wait, or the time without a process. So the shares of a mesh add up to 1.
- If A waits for B, and all of B waits for C, then A waits for C. For example, a generator without requests waits for
  free slots while the rollout workers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.observability.spans import Life, Recorded

ROLLOUTS, RANK_0, SLOTS, GONE = "rollouts", "rank 0", "slots", "its restart"
"""Labels of waits: the rollout workers; the first rank of the same mesh; room for one more group; a process."""

ORDER = ("trainer", "generator", "rollout", "gateway", "router", "relay", "controller")
COMPUTE = ("trainer", "generator")
"""Kinds of meshes whose devices cost something."""

MOST_CELLS = 500_000
"""Beyond so many changes of anybody's state, the window is cut into so many equal cells."""

MEANINGS = {
    ROLLOUTS: "the rollout workers, which were busy",
    SLOTS: "free slots, which a train step and its weight sync give back",
    "generators": "the generators, which were busy",
    "environment": "user code of the environment",
    "programs": "the environment's programs",
    "weights": "weights",
    RANK_0: "rank 0",
}

HINTS = {
    ("generator", SLOTS): "a larger loop.max_staleness lets them go on while the trainer works",
    ("generator", ROLLOUTS): "more rollout.workers keep them supplied",
    ("generator", "environment"): "more groups in flight (loop.max_staleness) or quicker user code fills this time",
    ("trainer", "generators"): "more generators, shorter answers or a larger loop.max_staleness fill this time",
    ("trainer", "environment"): "quicker user code or a larger loop.max_staleness fills this time",
    ("trainer", ROLLOUTS): "more rollout.workers fill this time",
}


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


def steps_of(lives: Sequence[Life]) -> list[Recorded]:
    """The train steps, as the controller saw them."""
    return sorted(
        (span for life in lives if life.mesh == "controller" for span in life.others if span.lane == "train"),
        key=lambda span: span.began,
    )


def find_bubbles(lives: Sequence[Life]) -> list[Account]:
    """How all meshes spent the time of the steps; empty if there is no step."""
    parts = [steps for life in lives if (steps := steps_of([life]))]
    windows = [(steps[0].began, max(step.ended for step in steps)) for steps in parts]
    return accounts(lives, *windows) if windows else []


def accounts(lives: Sequence[Life], *windows: tuple[float, float]) -> list[Account]:
    """How every mesh spent some windows of time, from one moment to another each, that do not overlap."""
    ranks: dict[tuple[str, int], list[Recorded]] = {}
    for life in lives:
        ranks.setdefault((life.mesh, life.rank), []).extend(life.main)
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


def _grid(everything: object, first: float, last: float) -> np.ndarray:
    """[K + 1] times between which no state changes, the window's edges first and last."""
    moments = [moment for spans in everything for span in spans for moment in (span.began, span.ended)]  # type: ignore[attr-defined]
    inside = np.unique(np.clip(np.array([first, last, *moments]), first, last))
    return inside if len(inside) <= MOST_CELLS else np.linspace(first, last, MOST_CELLS + 1)


def _states(spans: Sequence[Recorded], middles: np.ndarray, codes: dict[str, int]) -> np.ndarray:
    """[K] int64, the code of what one rank does in each cell; 0 is work."""
    if not spans:
        return np.full(len(middles), codes[GONE])
    began = np.array([span.began for span in spans])
    ended = np.array([span.ended for span in spans])
    code = np.array([codes[span.waits_for] for span in spans])
    at = np.searchsorted(began, middles, side="right") - 1
    # between two pieces there is only what rounding took away
    inside = (at >= 0) & (middles <= ended[at] + _ROUNDING)
    return np.where(inside, code[at], codes[GONE])


_ROUNDING = 1e-5


def _resolve(mine: np.ndarray, label: int, others: Sequence[np.ndarray]) -> None:
    """Where one waits for others that all wait, it waits for what the first of them waits for."""
    all_wait = np.all([other > 0 for other in others], axis=0)
    at = (mine == label) & all_wait
    mine[at] = others[0][at]
