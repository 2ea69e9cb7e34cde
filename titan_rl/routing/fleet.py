"""The state machine of the generators behind a router: which ones serve, and when each takes new weights.

    RECOVERING ─▶ SYNCING ─ verified ─▶ SERVING ─ drain ─▶ SYNCING            any ─▶ DEAD
                     │  ▲                  │ └─ hot swap verified ─▶ SERVING at the new version
                     │  └──── STALE ◀──────┘ pull failed
                     └─ pull failed ─▶ STALE        SERVING ─▶ PINNED, ASLEEP ─▶ SYNCING
    spare: ASLEEP ─ another died ─▶ RECOVERING          DEAD ─ joined ─▶ a new RECOVERING or ASLEEP

It decides; the actor waits for idleness, pulls, and reports back:

    ask(v) ─▶ startable(): [g0]  ─▶ (drain: wait until g0 is idle) ─▶ pulling(g0) = v ─▶ verified(g0, v) | failed(g0, …)

Usually all generators go to the newest version. In a deterministic run several versions are wanted at once
(`ask_beside`): each is served until it is retired, because groups are sampled from start to end by one version. Which
generator takes which, `WantedVersions` chooses.

Always true, after every method:

- only `verified` leads to SERVING; no generator goes back to an older version, except to a wanted one that nobody
  serves; DEAD is final: a replacement under the same name is a new generator that starts from nothing;
- besides `others`, at most `serving` generators are in service. The rest are spares: one follows a generator that
  dies at once, but for one of `others`;
- a generator in SYNCING, draining or pulling, takes no requests; with `hot_swap` a serving generator keeps serving
  while it pulls;
- at most `max_syncing` serving generators are closed for a sync at once (0: any number). Generators that do not serve
  anyway (new, stale, asleep) start at once;
- a pinned generator stays at its version; the last serving generator is never pinned;
- a generator has one pull at a time. What it takes is decided when the pull begins. A failed pull is retried
  `retries` times per requested version;
- a verified generator serves even if a newer version was requested meanwhile. So every successful pull serves waiting
  requests, however fast versions follow each other; `min_version` protects requests that need a newer one;
- nobody waits for a generator whose pull is late while another one serves; it serves nothing until that pull ends;
- a fleet of which nobody serves is given up only when every generator is left out: before that a replacement comes.

Pure: no asyncio, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal

from titan_rl.errors import GeneratorNotServing, WeightsError
from titan_rl.routing.generator import NEVER, TRANSITIONS, FleetListener, GeneratorHealth, GeneratorState
from titan_rl.routing.wanted_versions import WantedVersions
from titan_rl.types import PolicyVersion

SyncMode = Literal["drain", "hot_swap"]

_RECOVERING, _SERVING, _SYNCING, _PINNED, _ASLEEP, _STALE, _DEAD = GeneratorState


class Fleet:
    """All generators of one router, by name."""

    def __init__(
        self,
        listener: FleetListener,
        *,
        mode: SyncMode = "drain",
        max_syncing: int = 0,
        retries: int = 1,
        serving: int | None = None,
        others: Collection[str] = (),
    ) -> None:
        """
        Args:
            serving: generators in service besides `others`; further ones wait as spares. None: all are in service.
        """
        self._listener = listener
        self._serving, self._of_other_kinds = serving, others
        self._mode = mode
        self._max_syncing = max_syncing
        self._retries = retries
        self._generators: dict[str, GeneratorHealth] = {}
        self._wants = WantedVersions()

    def __getitem__(self, name: str) -> GeneratorHealth:
        return self._generators[name]

    def __iter__(self) -> Iterator[GeneratorHealth]:
        return iter(self._generators.values())

    @property
    def is_given_up(self) -> bool:
        """Whether no generator lives or is to be replaced."""
        return bool(self._generators) and all(health.left_out for health in self)

    def describe(self) -> str:
        """Every generator's state, or why it is stale or dead."""
        return "; ".join(f"{health.name}: {health.reason or health.state}" for health in self)

    # New weights.

    @property
    def target(self) -> PolicyVersion | None:
        """Newest version that was requested."""
        return self._wants.target

    @property
    def wanted(self) -> list[PolicyVersion]:
        """Versions that are to be served, oldest first."""
        return self._wants.versions

    def ask(self, version: PolicyVersion) -> None:
        """Request that the fleet serves `version`, and no other.

        Raises:
            WeightsError: it is older than a version requested before. A newer incarnation is newer than any step of
                the previous one.
        """
        if self.target is not None and version < self.target:
            raise WeightsError(
                f"pull refused: {version} is older than {self.target}, which the fleet was asked to serve"
            )
        for health in self:
            # Requested again: generators that failed get new attempts.
            if version != self.target or not health.is_syncing:
                health.failures = 0
        self._wants = WantedVersions(version, [version])

    def ask_beside(self, version: PolicyVersion) -> None:
        """Request that some generator serves `version`, beside the other versions that are wanted."""
        self._wants = WantedVersions(max(version, self.target or NEVER), sorted({*self.wanted, version}))
        for health in self:
            health.failures = 0

    def start_over(self) -> None:
        """The trainer goes on from an earlier state: what is requested next may be older than what was. Until then
        everybody serves what they serve."""
        self._wants = WantedVersions()
        for health in self:
            health.reached = NEVER

    def retire(self, version: PolicyVersion) -> None:
        """A version need not be served any more."""
        if version in self.wanted:
            self.wanted.remove(version)

    def is_served(self, version: PolicyVersion) -> bool:
        return any(health.state is _SERVING and health.version == version for health in self)

    def is_lost(self, version: PolicyVersion) -> bool:
        """Whether nobody serves the version, and every generator is left out, a spare, or has failed to pull too
        often."""
        given_up = (health.left_out or health.is_spare or health.failures > self._retries for health in self)
        return not self.is_served(version) and all(given_up)

    def startable(self, load: Callable[[str], int], demanded: Collection[PolicyVersion] = ()) -> list[str]:
        """Generators whose sync begins now. Each is in a sync from here until `verified`, `failed` or `died`, whichever
        comes first; a sync that has ended reports nothing more.

        If only some may close at once, those with the oldest version go first, and of equals those with the least load:
        an idle generator is back at once, while a busy one occupies a place for a whole drain.

        Args:
            demanded: versions that waiting requests ask for.
        """
        started = []
        self._wants.demanded = demanded
        for health in sorted(self, key=lambda health: (health.version or NEVER, load(health.name))):
            if (goal := self._goal(health, idle=not load(health.name))) is None:
                continue
            drains = health.state is _SERVING and self._mode == "drain"
            if drains and self._max_syncing and sum(each.is_closed for each in self) >= self._max_syncing:
                continue
            health.sync_from, health.pulls = health.state, goal
            if drains or health.state not in (_SERVING, _SYNCING):
                self.move(health.name, _SYNCING)
            started.append(health.name)
        return started

    def must_drain(self, name: str) -> bool:
        """Whether the generator's sync must first wait until the generator is idle."""
        return self[name].state is _SYNCING

    def pulling(self, name: str) -> PolicyVersion:
        """The pull itself begins now. Returns the version to pull."""
        health = self[name]
        health.pulls = self._wants.best_for(health, self)
        return health.pulls

    def goes_back(self, name: str) -> bool:
        """Whether the version that the sync pulls may be older than the one that the generator has: a generator whose
        version is unknown may have served another router."""
        health = self[name]
        return health.pulls is not None and (health.version is None or health.pulls < health.version)

    def verified(self, name: str, version: PolicyVersion) -> None:
        """The pull succeeded, and the generator serves. If a newer version was requested meanwhile, `startable` returns
        it again: assign waiting requests before that."""
        health = self[name]
        self._ended(health)
        before = self.target is None or version > self.target  # it was requested before `start_over`
        health.must_wake, health.failures, health.reached = False, 0, NEVER if before else version
        self.move(name, _SERVING, version=version)

    def failed(self, name: str, reason: str) -> None:
        """The pull ended without verified weights; the generator serves nothing."""
        health = self[name]
        if health.pulls in (*self.wanted, self.target):  # a failed pull of an overtaken version does not count
            health.failures += 1
        self._ended(health)
        self.move(name, _STALE, reason=reason)

    def late(self, name: str, reason: str) -> None:
        """The sync has exceeded its time limit and goes on. Until `verified`, `failed` or `died` the generator serves
        nothing and nobody waits for it. Does nothing if one of these came first."""
        health = self[name]
        if health.is_syncing and not health.is_late:
            self.move(name, _STALE, reason=reason)

    def settled(self, version: PolicyVersion) -> bool:
        """Whether no generator is still on its way to `version`: each has reached it, is late, failed for good, or may
        not take it (dead, pinned, asleep). If none has reached it, late ones and replacements are waited for."""
        if any(
            health.reached < version and not health.is_late and (health.is_syncing or self._goal(health) is not None)
            for health in self
        ):
            return False
        reached = any(health.reached >= version and health.state is not _DEAD for health in self)
        return reached or not any(health.is_awaited or health.is_late for health in self)

    # Who is there.

    def joined(self, name: str) -> None:
        """A generator is up: a new one, or the replacement of a dead one, which starts from nothing. It recovers, or
        waits as a spare if enough are in service.

        Raises:
            ValueError: the generator of that name is not dead.
        """
        if name in self._generators and self[name].state is not _DEAD:
            raise ValueError(f"generator {name} is already in the fleet")
        full = self._is_full and name not in self._of_other_kinds
        self._generators[name] = GeneratorHealth(name)
        if full:
            self.move(name, _ASLEEP)

    def awaited(self, name: str) -> None:
        """A generator is dead, or not up yet, and will join: nothing that it could serve is given up before."""
        self._generators[name] = GeneratorHealth(name, state=_DEAD, reason="it is being replaced")

    def died(self, name: str, reason: str) -> None:
        """The generator is dead, and a spare takes its place. Unless it is `left_out`, a replacement will come.
        Idempotent: the first reason is kept."""
        health = self[name]
        if health.state is _DEAD:
            return
        health.sync_from = None
        self.move(name, _DEAD, reason=reason)
        self._wake_spares()

    def left_out(self, name: str, reason: str) -> None:
        """The generator is dead and will not be replaced. It may be unknown: dead before this router was there."""
        self._generators.setdefault(name, GeneratorHealth(name))
        self.died(name, reason)
        self[name].reason, self[name].left_out = reason, True

    def leaves(self, name: str) -> None:
        """The generator will be taken away: it begins no sync any more, and is not pinned."""
        self[name].leaving = True

    def resize(self, serving: int) -> None:
        """So many generators are to be in service from now on. Spares follow if there are more; if there are fewer,
        those that serve go on until one of them dies."""
        self._serving = serving
        self._wake_spares()

    def _wake_spares(self) -> None:
        for spare in [each for each in self if each.is_spare]:
            if not self._is_full:
                self.move(spare.name, _RECOVERING)

    @property
    def _is_full(self) -> bool:
        in_service = [each.name for each in self if each.state is not _DEAD and not each.is_spare]
        return self._serving is not None and len({*in_service} - {*self._of_other_kinds}) >= self._serving

    # Out of service.

    def sleep(self, name: str) -> None:
        """Put the generator to sleep: from now on it takes no requests.

        Raises:
            GeneratorNotServing: it is in a sync, asleep already, pinned or dead.
        """
        health = self[name]
        if health.is_syncing or health.state not in (_SERVING, _STALE, _RECOVERING):
            doing = "in a change of weights" if health.is_syncing else health.state
            raise GeneratorNotServing(f"{name} cannot be put to sleep: it is {doing}")
        health.must_wake, health.reached = True, NEVER
        self.move(name, _ASLEEP)

    def wake(self, name: str) -> None:
        """Wake the generator: it comes back through a verified pull of the target (`startable`).

        Raises:
            GeneratorNotServing: it is not asleep, or a spare, or nothing was published yet.
        """
        health = self[name]
        if health.state is not _ASLEEP or health.is_spare:
            raise GeneratorNotServing(f"{name} cannot be woken: it is {'a spare' if health.is_spare else health.state}")
        if self.target is None:
            raise GeneratorNotServing(f"{name} cannot be woken: there are no weights to pull yet")
        health.failures = 0
        self.move(name, _SYNCING)

    def pin(self, version: PolicyVersion, load: Callable[[str], int]) -> str:
        """Pin the least loaded generator that serves exactly `version`. Until `unpin` it takes no new weights and no
        requests of others. It finishes the requests that it runs.

        The last serving generator is never pinned, because training would stop silently. A fleet of one evaluates with
        ordinary requests, between two pulls.

        Returns:
            Its name.

        Raises:
            GeneratorNotServing: no generator serves exactly this version outside of a sync, or no other one serves.
        """
        serving = [health for health in self if health.state is _SERVING]
        free = [each.name for each in serving if each.version == version and not (each.is_syncing or each.leaving)]
        if not free:
            states = ", ".join(f"{health.name} is {health.state} at {health.version}" for health in self)
            raise GeneratorNotServing(f"no generator can be pinned at {version}: {states}")
        if len(serving) == 1:
            raise GeneratorNotServing(f"{free[0]} cannot be pinned at {version}: nobody else would serve")
        name = min(free, key=load)
        self.move(name, _PINNED)
        return name

    def unpin(self, name: str) -> None:
        """End the pin: the generator comes back through a verified pull of the target (`startable`).

        Raises:
            GeneratorNotServing: it is not pinned. It may be unknown: left out before this router was there.
        """
        health = self._generators.get(name)
        if health is None or health.state is not _PINNED:
            raise GeneratorNotServing(f"{name} cannot be unpinned: it is {health.state if health else 'left out'}")
        health.failures, health.reached = 0, NEVER
        self.move(name, _SYNCING)

    def move(self, name: str, state: GeneratorState, *, version: PolicyVersion | None = None, reason: str = "") -> None:
        """Change a generator's state and tell the strategy.

        Args:
            version: the verified version; only for SERVING.

        Raises:
            ValueError: the transition is not allowed, or the version is older than the generator's last one.
        """
        health = self._generators[name]
        if state not in TRANSITIONS[health.state]:
            raise ValueError(f"generator {name} cannot go from {health.state} to {state}")
        if state is _SERVING:
            if version is None or (version < (health.version or NEVER) and version != health.pulls):
                raise ValueError(f"generator {name} cannot go back from {health.version} to {version}")
            health.version = version
        health.state, health.reason = state, reason
        if state is _SERVING:
            assert health.version is not None
            self._listener.serves(name, health.version)
        elif state in (_STALE, _DEAD):
            self._listener.leaves(name)
        else:
            self._listener.pauses(name)

    def _ended(self, health: GeneratorHealth) -> None:
        """The sync has ended, late or not."""
        if health.is_late:
            self.move(health.name, _SYNCING)
        health.sync_from = None

    def _goal(self, health: GeneratorHealth, *, idle: bool = False) -> PolicyVersion | None:
        """The version that a sync of the generator would bring, if it should begin one."""
        if health.leaving or health.failures > self._retries:
            return None
        return self._wants.goal(health, self, idle=idle)
