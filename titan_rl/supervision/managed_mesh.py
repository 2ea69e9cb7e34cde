"""All that is known of one mesh, with one state. A pure state machine: time is handed in, and nothing is awaited here.

    PLACED ─▶ STARTING ─▶ BORN ─▶ UP ─▶ LOST ─▶ STARTING ─▶ …
                  └─────────┴───────────▶┘└─▶ GIVEN_UP ─▶ PLACED: its host has room again, or another one joined

A mesh is lost as a whole, with its first rank, and once per start. Failures in a row are counted. The pause before the
next start doubles with them up to `LONGEST_PAUSE`, and after `placement.restarts` of them it may be given up. One that
did its work begins to count anew, or was up for `SETTLED_SECONDS` before it died or stood still; not a trainer that has
finished no step, which would be replaced for ever.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from titan_rl.errors import MeshFailed, MeshLeaves
from titan_rl.supervision.placement import Kind, MeshPlan

SETTLED_SECONDS = 30.0
"""A mesh that was up for so long did not fail because of its start."""

LONGEST_PAUSE = 60.0
"""Seconds between two starts of a mesh that fails again and again."""


class MeshState(StrEnum):
    PLACED = "placed"
    """It has no processes yet."""
    STARTING = "starting"
    """Its processes start."""
    BORN = "born"
    """Its processes run, and its actors are set up."""
    UP = "up"
    LOST = "lost"
    """A process ended, an actor failed, or nothing moved: what is left of it is killed. It waits for its next start."""
    GIVEN_UP = "given up"
    """It failed too often."""


TRANSITIONS = {
    MeshState.PLACED: {MeshState.STARTING},
    MeshState.STARTING: {MeshState.BORN, MeshState.LOST},
    MeshState.BORN: {MeshState.UP, MeshState.LOST},
    MeshState.UP: {MeshState.LOST},
    MeshState.LOST: {MeshState.STARTING, MeshState.GIVEN_UP},
    MeshState.GIVEN_UP: {MeshState.PLACED},
}


@dataclass(slots=True, eq=False)
class ManagedMesh:
    """One mesh, from its first placement until nobody wants it any more."""

    plan: MeshPlan
    """Its processes, where they are or, while it has none, where they were last to be."""
    state: MeshState = MeshState.PLACED
    wanted: bool = True
    """False: it is not started any more, because its host left or the fleet is smaller."""
    ends_start: bool = True
    """Whether a failure ends the run, because the mesh was never up and is not started beside others."""
    fault: MeshFailed | None = None
    """Why it was lost last."""
    losses: int = 0
    """How often it was lost."""
    failures: int = 0
    """In a row."""
    up_since: float = 0.0
    client: Any = None
    """Its `MeshClient`, which outlives its processes."""
    handle: Any = None
    """Of rank 0, for those who call the mesh: of the newest processes that were born. To pickle one before that blocks
    the event loop."""
    births: int = 0
    """How many starts have brought its processes up."""
    pids: list[int] = field(default_factory=list)
    """Process ids, known while it is up."""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def kind(self) -> Kind:
        return self.plan.kind

    @property
    def is_up(self) -> bool:
        return self.state is MeshState.UP

    @property
    def is_starting(self) -> bool:
        return self.state in (MeshState.STARTING, MeshState.BORN)

    @property
    def is_idle(self) -> bool:
        """Whether nobody starts it."""
        return self.state in (MeshState.PLACED, MeshState.GIVEN_UP)

    def begin(self) -> None:
        self._move(MeshState.STARTING)

    def bear(self) -> None:
        self._move(MeshState.BORN)
        self.handle, self.births = self.client.actor, self.births + 1

    def ready(self, pids: list[int], now: float) -> None:
        self._move(MeshState.UP)
        self.pids, self.up_since, self.ends_start = pids, now, False

    def lose(self, fault: MeshFailed, now: float, *, has_worked: bool | None = None) -> bool:
        """A process of it ended, or it hangs. Returns whether that is news: of one start only the first fault is.
        `has_worked`: as `MeshClient` says."""
        if not (self.is_starting or self.is_up):
            return False
        if not isinstance(fault, MeshLeaves):
            if has_worked is None:
                has_worked = now - fault.still - self.up_since >= SETTLED_SECONDS
            self.failures = 1 if self.is_up and has_worked else self.failures + 1
        self._move(MeshState.LOST)
        self.fault, self.losses = fault, self.losses + 1
        return True

    def give_up(self) -> None:
        self._move(MeshState.GIVEN_UP)

    def revive(self) -> None:
        """Try it afresh, if it was given up or not started yet. It is started beside others: that may fail."""
        if self.state is MeshState.GIVEN_UP:
            self._move(MeshState.PLACED)
        self.failures, self.ends_start = 0, False

    def _move(self, state: MeshState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self.name}: {self.state} cannot become {state}")
        self.state = state


def pause_after(failures: int) -> float:
    """Seconds before the next try: none after the first failure, then 1, 2, 4, … `LONGEST_PAUSE`."""
    # without the bound on the exponent, a float overflows after some hours of failures
    return min(LONGEST_PAUSE, 2.0 ** min(failures - 2, 6)) if failures > 1 else 0.0
