"""The serving gate: which generator takes new weights when. It decides; the actor waits for idleness, pulls, reports:

    ask(v) ─▶ startable(): [g0]  ─▶ (drain: wait until g0 is idle) ─▶ pulling(g0) = v ─▶ verified(g0, v) | failed(g0, …)

Always true, after every method:

- a generator that drains or pulls to come to serve takes no requests; in `hot_swap` one that serves goes on serving;
- at most `max_syncing` generators that served are closed at once (0: any number); those that serve nothing anyway
  (new, stale, asleep) start at once;
- a pinned generator stays at its version and is never the last one that served when it was pinned;
- pulls coalesce: a generator that begins to pull takes the newest version asked for, and nothing ever goes back;
- what was verified serves, though a newer version may have been asked for meanwhile: however fast versions follow each
  other, every pull that ends well serves those who wait;
- a generator is under one pull at a time, and a failed one is tried again `retries` times per version asked for;
- nobody waits for a generator whose pull is late; it serves nothing until that pull ends.

Pure: no asyncio, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from titan_rl.errors import GeneratorFailed, GeneratorNotServing, WeightsError
from titan_rl.routing.fleet import FleetHealth, GeneratorState
from titan_rl.types import PolicyVersion

SyncMode = Literal["drain", "hot_swap"]


class ServingGate:
    """Drives a `FleetHealth` through changes of weights."""

    def __init__(self, fleet: FleetHealth, *, mode: SyncMode, max_syncing: int = 0, retries: int = 1) -> None:
        self._fleet = fleet
        self._mode = mode
        self._max_syncing = max_syncing
        self._retries = retries
        self._syncing: dict[str, PolicyVersion | None] = {}  # in a sync now → what it pulls; None before the pull
        self._closed: set[str] = set()  # served, and were closed to sync; until they serve again, fail or are late
        self._late: set[str] = set()  # in a sync that takes longer than it may
        self._woken: set[str] = set()  # asleep, and asked to wake
        self._released: set[str] = set()  # pinned, and asked to serve again
        self._failures: dict[str, int] = {}  # of pulls of the target, since it was asked for
        self._reached: dict[str, PolicyVersion] = {}  # verified since it last fell asleep

    def ask(self, version: PolicyVersion) -> None:
        """The fleet is to serve `version`.

        Raises:
            WeightsError: it is older than what was asked for before. A newer incarnation is newer than any step of
                the one before.
        """
        target = self._fleet.target
        try:
            self._fleet.aim(version)
        except ValueError as error:
            raise WeightsError(f"pull refused: {error}") from error
        if version != target:
            self._failures.clear()
        else:
            # Asked for again: what failed gets its attempts anew.
            self._failures = {name: count for name, count in self._failures.items() if name in self._syncing}

    def startable(self, load: Callable[[str], int]) -> list[str]:
        """Generators whose sync is to begin now. Each is in a sync from here until `verified`, `failed` or `died`.

        Where only some may close at once, those with the oldest version go first, and of equals those with the least
        load: an idle one is back at once, a busy one holds its place for a whole drain.
        """
        started = []
        waiting = [health for health in self._fleet if self._wants(health.name)]
        for health in sorted(waiting, key=lambda health: (health.version or _NEVER, load(health.name))):
            name = health.name
            if health.state is GeneratorState.SERVING and self._mode == "drain":
                if self._max_syncing and len(self._closed) >= self._max_syncing:
                    continue
                self._closed.add(name)
                self._fleet.sync_started(name)
            elif health.state not in (GeneratorState.SERVING, GeneratorState.SYNCING):
                self._released.discard(name)
                self._fleet.sync_started(name)
            self._syncing[name] = None
            started.append(name)
        return started

    def must_drain(self, name: str) -> bool:
        """Whether the sync that has begun waits until the generator is idle."""
        return self._fleet[name].state is GeneratorState.SYNCING

    def pulling(self, name: str) -> PolicyVersion:
        """The pull itself begins now: this is what to pull.

        Raises:
            GeneratorFailed: the generator died in its drain.
        """
        if name not in self._syncing:
            raise GeneratorFailed(f"{name} was to pull, but died before that: {self._fleet[name].reason}")
        target = self._fleet.target
        assert target is not None
        self._syncing[name] = target
        return target

    def wakes(self, name: str) -> bool:
        """Whether the generator's pull is to wake it up."""
        return name in self._woken

    def verified(self, name: str, version: PolicyVersion) -> None:
        """The pull ended well. If a newer version was asked for meanwhile, `startable` names the generator again: let
        in who waits before that."""
        self._resume(name)
        self._syncing.pop(name, None)
        self._closed.discard(name)
        self._woken.discard(name)
        self._failures.pop(name, None)
        self._reached[name] = version
        self._fleet.pull_verified(name, version)

    def failed(self, name: str, reason: str) -> None:
        """The pull ended without verified weights; the generator serves nothing."""
        self._resume(name)
        pulled = self._syncing.pop(name, None)
        self._closed.discard(name)
        if pulled is None or pulled == self._fleet.target:  # of an overtaken version it says nothing about the target
            self._failures[name] = self._failures.get(name, 0) + 1
        self._fleet.pull_failed(name, reason)

    def late(self, name: str, reason: str) -> None:
        """The sync takes longer than it may, and goes on: the generator serves nothing, and nobody waits for it, until
        `verified`, `failed` or `died`. Nothing happens where one of these came first."""
        if name in self._syncing and name not in self._late:
            self._late.add(name)
            self._closed.discard(name)
            self._fleet.pull_failed(name, reason)

    def died(self, name: str, reason: str) -> None:
        """The generator is gone, in a sync or not."""
        self._late.discard(name)
        self._syncing.pop(name, None)
        self._closed.discard(name)
        self._woken.discard(name)
        self._released.discard(name)
        self._fleet.died(name, reason)

    def sleep(self, name: str) -> None:
        """The generator is to give up its memory; from here it takes no requests.

        Raises:
            GeneratorNotServing: it is in a sync, asleep already, pinned or dead.
        """
        state = self._fleet[name].state
        if name in self._syncing or state not in (
            GeneratorState.SERVING,
            GeneratorState.STALE,
            GeneratorState.RECOVERING,
        ):
            doing = "in a change of weights" if name in self._syncing else state
            raise GeneratorNotServing(f"{name} cannot be put to sleep: it is {doing}")
        self._woken.discard(name)  # an earlier wake-up that failed
        self._reached.pop(name, None)  # it gives its weights up
        self._fleet.slept(name)

    def wake(self, name: str) -> None:
        """The generator is to come back, through a verified pull of the target (`startable`).

        Raises:
            GeneratorNotServing: it is not asleep, or nothing was published yet.
        """
        state = self._fleet[name].state
        if state is not GeneratorState.ASLEEP:
            raise GeneratorNotServing(f"{name} cannot be woken: it is {state}")
        if self._fleet.target is None:
            raise GeneratorNotServing(f"{name} cannot be woken: there are no weights to pull yet")
        self._failures.pop(name, None)
        self._woken.add(name)

    def pin(self, version: PolicyVersion, load: Callable[[str], int]) -> str:
        """Lease a generator that serves exactly `version`, the one with the least load. It takes no weights and no
        requests of others until `unpin`; what it runs it finishes, at that version.

        The last one that serves is never leased: training would stop, silently. A fleet of one evaluates by ordinary
        requests, between two pulls.

        Returns:
            Its name.

        Raises:
            GeneratorNotServing: nobody serves exactly this version outside of a change of weights, or nobody else
                serves.
        """
        serving = [health for health in self._fleet if health.state is GeneratorState.SERVING]
        free = [health.name for health in serving if health.version == version and health.name not in self._syncing]
        if not free:
            states = ", ".join(f"{health.name} is {health.state} at {health.version}" for health in self._fleet)
            raise GeneratorNotServing(f"no generator can be pinned at {version}: {states}")
        if len(serving) == 1:
            raise GeneratorNotServing(f"{free[0]} cannot be pinned at {version}: nobody else would serve")
        name = min(free, key=load)
        self._fleet.pinned(name)
        return name

    def unpin(self, name: str) -> None:
        """The lease is over: the generator is to pull the target, verified, and serve (`startable`).

        Raises:
            GeneratorNotServing: it is not pinned.
        """
        state = self._fleet[name].state
        if state is not GeneratorState.PINNED:
            raise GeneratorNotServing(f"{name} cannot be unpinned: it is {state}")
        self._failures.pop(name, None)
        self._reached.pop(name, None)
        self._released.add(name)

    def settled(self, version: PolicyVersion) -> bool:
        """Whether no generator is still on its way to `version`: each has reached it, failed for good, or may not
        take it (dead, pinned, asleep)."""
        return not any(
            self._reached.get(health.name, _NEVER) < version
            and health.name not in self._late
            and (health.name in self._syncing or self._wants(health.name))
            for health in self._fleet
        )

    def _resume(self, name: str) -> None:
        """A late sync ends as any other."""
        if name in self._late:
            self._late.discard(name)
            self._fleet.sync_started(name)

    def _wants(self, name: str) -> bool:
        """Whether the generator should begin a sync, if there is room."""
        health, target = self._fleet[name], self._fleet.target
        if target is None or name in self._syncing or self._failures.get(name, 0) > self._retries:
            return False
        match health.state:
            case GeneratorState.RECOVERING | GeneratorState.STALE | GeneratorState.SYNCING:
                return True
            case GeneratorState.SERVING:
                return health.version is None or health.version < target
            case GeneratorState.ASLEEP:
                return name in self._woken
            case GeneratorState.PINNED:
                return name in self._released
            case GeneratorState.DEAD:
                return False


_NEVER = PolicyVersion(-1, 0)
