"""A generator as the router knows it: its state, its version, the sync that is running, and who is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from titan_rl.types import PolicyVersion

NEVER = PolicyVersion(-1, 0)


class GeneratorState(StrEnum):
    """Whether a generator can serve requests now, and why not."""

    RECOVERING = "recovering"
    """Up, but has never held verified weights. The first state of every generator, replacements included."""
    SERVING = "serving"
    """Holds verified weights and takes requests."""
    SYNCING = "syncing"
    """Draining for a pull, or pulling; takes no new requests."""
    PINNED = "pinned"
    """Reserved at its version for whoever pinned it; takes no requests of others."""
    ASLEEP = "asleep"
    """Gave up its memory, or waits as a spare that has never held weights; wakes only through a verified pull."""
    STALE = "stale"
    """Its last pull failed or is late; serves nothing until a later pull is verified. The reason is kept."""
    DEAD = "dead"
    """Its process is gone. Final: a replacement under its name is another generator."""


_RECOVERING, _SERVING, _SYNCING, _PINNED, _ASLEEP, _STALE, _DEAD = GeneratorState

TRANSITIONS: dict[GeneratorState, frozenset[GeneratorState]] = {
    _RECOVERING: frozenset({_SYNCING, _ASLEEP, _DEAD}),
    _SERVING: frozenset({_SERVING, _SYNCING, _PINNED, _ASLEEP, _STALE, _DEAD}),
    _SYNCING: frozenset({_SERVING, _STALE, _DEAD}),
    _PINNED: frozenset({_SYNCING, _DEAD}),
    _ASLEEP: frozenset({_SYNCING, _RECOVERING, _DEAD}),
    _STALE: frozenset({_SYNCING, _ASLEEP, _DEAD}),
    _DEAD: frozenset(),
}


class FleetListener(Protocol):
    """Told of every change of who may serve. A routing strategy keeps its list of candidates with it."""

    def serves(self, name: str, version: PolicyVersion) -> None:
        """The generator takes requests now, at this version (new to the strategy, back, or at a newer version)."""
        ...

    def pauses(self, name: str) -> None:
        """It takes no requests for now and will be back: syncing, pinned or asleep."""
        ...

    def leaves(self, name: str) -> None:
        """It may never be back: stale or dead."""
        ...


@dataclass(slots=True)
class GeneratorHealth:
    """One generator as the fleet knows it."""

    name: str
    state: GeneratorState = GeneratorState.RECOVERING
    version: PolicyVersion | None = None
    """Last verified version; None before the first."""
    reason: str = ""
    """Why it is STALE or DEAD."""
    sync_from: GeneratorState | None = None
    """The state in which the running sync (drain, pull, verification) began; None: no sync is running."""
    pulls: PolicyVersion | None = None
    """The version that the sync pulls; during its drain, the one that it would pull now."""
    leaving: bool = False
    """It will be taken away, and begins no sync any more."""
    must_wake: bool = False
    """It gave up its memory in sleep, so it takes weights only by a wake-up."""
    failures: int = 0
    """Failed pulls of the target since it was requested."""
    reached: PolicyVersion = NEVER
    """Last version verified since it fell asleep or was pinned."""
    left_out: bool = False
    """It is dead, and no replacement is to come."""

    @property
    def is_syncing(self) -> bool:
        return self.sync_from is not None

    @property
    def is_closed(self) -> bool:
        """It served before its sync and takes no requests now."""
        return self.state is _SYNCING and self.sync_from is _SERVING

    @property
    def is_spare(self) -> bool:
        """It waits, built and without weights, for the place of a generator that dies."""
        return self.state is _ASLEEP and not self.must_wake

    @property
    def is_awaited(self) -> bool:
        """It is dead, and a replacement under its name is to come."""
        return self.state is _DEAD and not self.left_out

    @property
    def is_late(self) -> bool:
        """Its sync goes on after its time limit."""
        return self.state is _STALE and self.is_syncing

    @property
    def is_out_of_service(self) -> bool:
        """It does not serve everybody, and is not about to."""
        state = GeneratorState
        return self.state in (state.ASLEEP, state.PINNED, state.STALE, state.DEAD)

    def status(
        self, load: int, in_flight: int, served: int, failed: int, aborted: int, aborted_tokens: int
    ) -> GeneratorStatus:
        """With the router's own numbers."""
        return GeneratorStatus(
            name=self.name,
            state=self.state.value,
            version=str(self.version) if self.version is not None else "none",
            load=load,
            in_flight=in_flight,
            served=served,
            failed=failed,
            aborted=aborted,
            aborted_tokens=aborted_tokens,
            last_error=self.reason,
        )


@dataclass(frozen=True, slots=True)
class GeneratorStatus:
    """One generator as the router sees it; plain numbers and words."""

    name: str
    state: str
    """A `GeneratorState`."""
    version: str
    load: int
    """Estimated tokens in flight."""
    in_flight: int
    """Requests that it runs or is about to run."""
    served: int
    """Completions handed to callers whose last part this generator sampled."""
    failed: int
    """Attempts that ended in an error."""
    aborted: int
    """Answers that it was sampling when their callers gave them up, or out of time."""
    aborted_tokens: int
    """Tokens of these answers."""
    last_error: str
    """Why it is stale or dead."""
