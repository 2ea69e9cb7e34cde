"""The state of every generator, and the only ways from one state to another.

There is no way to SERVING but through `pull_verified`, and no generator goes back to an older version. A version that
was overtaken by a newer publication is served until the newer one is there: a request's `min_version` keeps those away
that must not have it. DEAD is final; a replacement is a new generator with a new name.

    RECOVERING ─▶ SYNCING ─ verified ─▶ SERVING ─ drain ─▶ SYNCING            any ─▶ DEAD
                     │  ▲                  │ └─ hot swap verified ─▶ SERVING at the new version
                     │  └──── STALE ◀──────┘ pull failed
                     └─ pull failed ─▶ STALE        SERVING ─▶ PINNED, ASLEEP ─▶ SYNCING

Pure: no asyncio, no torch, no Monarch. Whoever calls does the I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from titan_rl.types import PolicyVersion


class GeneratorState(StrEnum):
    """What a generator is good for right now."""

    RECOVERING = "recovering"
    """Up, but has never held verified weights. The first state of every generator."""
    SERVING = "serving"
    """Holds verified weights and takes requests."""
    SYNCING = "syncing"
    """Draining for a pull, or pulling; takes no new requests."""
    PINNED = "pinned"
    """Leased at its version; takes no requests of others."""
    ASLEEP = "asleep"
    """Gave up its memory; wakes only through a verified pull."""
    STALE = "stale"
    """Its last pull failed or is late; serves nothing until a later pull is verified. The reason is kept."""
    DEAD = "dead"
    """Its process or engine is gone. Final."""


_TRANSITIONS: dict[GeneratorState, frozenset[GeneratorState]] = {
    GeneratorState.RECOVERING: frozenset({GeneratorState.SYNCING, GeneratorState.ASLEEP, GeneratorState.DEAD}),
    GeneratorState.SERVING: frozenset(
        {
            GeneratorState.SERVING,
            GeneratorState.SYNCING,
            GeneratorState.PINNED,
            GeneratorState.ASLEEP,
            GeneratorState.STALE,
            GeneratorState.DEAD,
        }
    ),
    GeneratorState.SYNCING: frozenset({GeneratorState.SERVING, GeneratorState.STALE, GeneratorState.DEAD}),
    GeneratorState.PINNED: frozenset({GeneratorState.SYNCING, GeneratorState.DEAD}),
    GeneratorState.ASLEEP: frozenset({GeneratorState.SYNCING, GeneratorState.DEAD}),
    GeneratorState.STALE: frozenset({GeneratorState.SYNCING, GeneratorState.ASLEEP, GeneratorState.DEAD}),
    GeneratorState.DEAD: frozenset(),
}


@dataclass(slots=True)
class GeneratorHealth:
    """One generator as the fleet knows it."""

    name: str
    state: GeneratorState = GeneratorState.RECOVERING
    version: PolicyVersion | None = None
    """Last verified version; None before the first."""
    reason: str = ""
    """Why it is STALE or DEAD."""


class FleetListener(Protocol):
    """Hears what changes about who may serve: a routing strategy keeps its candidates by it."""

    def serves(self, name: str, version: PolicyVersion) -> None:
        """The generator takes requests now, at this version (new to the strategy, back, or at a newer version)."""
        ...

    def pauses(self, name: str) -> None:
        """It takes no requests for now and will be back: syncing, pinned or asleep."""
        ...

    def leaves(self, name: str) -> None:
        """It may never be back: stale or dead."""
        ...


class FleetHealth:
    """All generators of one router, by name."""

    def __init__(self, listener: FleetListener) -> None:
        self._listener = listener
        self._generators: dict[str, GeneratorHealth] = {}
        self._serving = 0
        self.target: PolicyVersion | None = None
        """Newest version that anybody was asked to pull."""

    def __getitem__(self, name: str) -> GeneratorHealth:
        return self._generators[name]

    def __iter__(self) -> Iterator[GeneratorHealth]:
        return iter(self._generators.values())

    def add(self, name: str) -> None:
        if name in self._generators:
            raise ValueError(f"generator {name} is already in the fleet")
        self._generators[name] = GeneratorHealth(name)

    @property
    def anyone_serving(self) -> bool:
        return self._serving > 0

    @property
    def all_dead(self) -> bool:
        return bool(self._generators) and all(h.state is GeneratorState.DEAD for h in self)

    def aim(self, version: PolicyVersion) -> None:
        """The whole fleet is to serve `version`. Raises ValueError if that is older than what it was asked before."""
        if self.target is not None and version < self.target:
            raise ValueError(f"{version} is older than {self.target}, which the fleet was asked to serve")
        self.target = version

    def sync_started(self, name: str) -> None:
        """The generator takes no more requests until a pull is verified."""
        self._move(name, GeneratorState.SYNCING)

    def pull_verified(self, name: str, version: PolicyVersion) -> None:
        """The engine holds `version` and its fingerprints agree: it serves.

        Raises:
            ValueError: it is older than what was verified here before, or the generator was not SYNCING or SERVING.
        """
        health = self._generators[name]
        if health.state is GeneratorState.DEAD:
            return
        if health.version is not None and version < health.version:
            raise ValueError(f"generator {name} cannot go back from {health.version} to {version}")
        health.version = version
        self._move(name, GeneratorState.SERVING)

    def pull_failed(self, name: str, reason: str) -> None:
        """The pull ended without verified weights; nothing may be served from here."""
        if self._generators[name].state is not GeneratorState.DEAD:
            self._move(name, GeneratorState.STALE, reason)

    def pinned(self, name: str) -> None:
        """Leased at the version it serves; ends with `sync_started`."""
        self._move(name, GeneratorState.PINNED)

    def slept(self, name: str) -> None:
        self._move(name, GeneratorState.ASLEEP)

    def died(self, name: str, reason: str) -> None:
        """Idempotent: the first reason is kept."""
        if self._generators[name].state is not GeneratorState.DEAD:
            self._move(name, GeneratorState.DEAD, reason)

    def _move(self, name: str, state: GeneratorState, reason: str = "") -> None:
        health = self._generators[name]
        if state not in _TRANSITIONS[health.state]:
            raise ValueError(f"generator {name} cannot go from {health.state} to {state}")
        self._serving += (state is GeneratorState.SERVING) - (health.state is GeneratorState.SERVING)
        health.state = state
        health.reason = reason
        match state:
            case GeneratorState.SERVING:
                assert health.version is not None
                self._listener.serves(name, health.version)
            case GeneratorState.STALE | GeneratorState.DEAD:
                self._listener.leaves(name)
            case _:
                self._listener.pauses(name)
