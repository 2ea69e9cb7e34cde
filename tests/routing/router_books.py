"""What a router must have in its books: callers, attempts, syncs; and what must hold of them after every event.

The books are kept by `RouterDriver` independently of the parts that they are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Assignment, Dispatcher, estimated_cost
from titan_rl.routing.health import GONE, Fleet, Phase
from titan_rl.routing.strategies import RoutingStrategy, StickySession
from titan_rl.routing.version_plan import VersionPlan
from titan_rl.types import Completion, GenerationRequest, PolicyVersion

WAITING, LIVE, LEFT = "waiting", "live", "left"

UNMOVED = {Phase.ASLEEP, Phase.SPARE, *GONE}


@dataclass(slots=True)
class Caller:
    """One request as its caller sees it."""

    asked: GenerationRequest
    place: str
    given_up: bool = False
    deaths: int = 0  # of generators under it
    segments: list[Completion] = field(default_factory=list)  # what the stitched completion must consist of

    @property
    def sampled(self) -> list[int]:
        return [int(token) for part in self.segments for token in part.token_ids]


@dataclass(slots=True)
class Pull:
    """A caller that waits for the fleet to settle."""

    version: PolicyVersion
    done: bool = False


class RouterBooks:
    """Dispatcher, fleet and strategy of a router, and what they should agree with."""

    def __init__(
        self, strategy: RoutingStrategy, *, generators: int, serving: int | None = None, **settings: Any
    ) -> None:
        self.strategy = strategy
        self.config = RouterConfig(**settings)
        self.fleet = Fleet(strategy, serving=serving)
        self.plan = VersionPlan(self.fleet, self.config)
        self.dispatcher = Dispatcher(strategy, self.fleet, self.config)
        self.serving = serving
        self.names = [f"g{index}" for index in range(generators)]
        for name in self.names:
            self.fleet.join(name)
        self.callers: dict[str, Caller] = {}
        self.live: dict[str, tuple[Assignment, Caller]] = {}  # by attempt id
        self.attempts: set[str] = set()  # every attempt id ever
        self.syncs: dict[str, PolicyVersion | None] = {}  # tasks; the version once the pull itself has begun
        self.closed: set[str] = set()
        self.late: set[str] = set()  # of the syncs
        self.failures: dict[str, int] = {}  # of pulls of wanted versions, since the wanted versions changed
        self.held: dict[str, PolicyVersion] = {}  # last verified
        self.pulls: list[Pull] = []

    def live_on(self, name: str) -> list[str]:
        return [attempt_id for attempt_id, (assignment, _) in self.live.items() if assignment.generator == name]

    @property
    def anyone_serves(self) -> bool:
        return any(health.phase.serves for health in self.fleet)

    def can_serve(self, name: str, asked: GenerationRequest) -> bool:
        health = self.fleet[name]
        if not health.phase.serves:
            return False
        if asked.exact_version is not None and health.phase is Phase.SWAPPING:
            return False
        assert health.version is not None
        return asked.allows(health.version)

    @property
    def newest(self) -> PolicyVersion | None:
        return self.plan.wanted[-1] if self.plan.wanted else None

    @property
    def movable(self) -> list[str]:
        """Those that take weights, sooner or later."""
        able = [health.name for health in self.fleet if health.phase not in UNMOVED]
        return [name for name in able if self.failures.get(name, 0) <= self.config.pull_retries]

    def homes(self) -> dict[str, str | None]:
        if not isinstance(self.strategy, StickySession):
            return {}
        waiting = [c.asked.session_id for c in self.callers.values() if c.place == WAITING]
        return {session: self.strategy.generator_of(session) for session in waiting if session is not None}

    def check(self) -> None:
        places = [caller.place for caller in self.callers.values()]
        assert self.dispatcher.waiting == places.count(WAITING)
        assert sum(map(self.dispatcher.in_flight, self.names)) == len(self.live)
        assert places.count(LIVE) == [caller.place for _, caller in self.live.values()].count(LIVE)
        for name in self.names:
            live = self.live_on(name)
            assert self.dispatcher.live_on(name) == live
            assert self.dispatcher.load(name) == sum(estimated_cost(self.live[a][0].request) for a in live)
        assert all(self.fleet[name].phase is Phase.LATE for name in self.late)
        assert not self.dispatcher.failures(), "the router has asked for them"
        assert not self.config.max_syncing or len(self.closed) <= self.config.max_syncing
        for health in self.fleet:
            assert health.version == self.held.get(health.name)
            assert self.failures.get(health.name, 0) <= self.config.pull_retries + 1
        assert all(self.fleet[name].phase not in GONE for name in self.syncs)
        for _, caller in self.live.values():
            generator = next(each.generator for each, its in self.live.values() if its is caller)
            exact = caller.asked.exact_version
            assert exact is None or exact == self.held[generator], "its weights changed under it"
            assert exact is None or self.fleet[generator].phase is not Phase.SWAPPING
        if len(self.movable) >= len(self.plan.wanted) and not all(pull.done for pull in self.pulls):
            awaited = any(health.phase is Phase.DEAD for health in self.fleet)
            assert self.syncs or awaited, "nobody will move"
        spares = sum(health.phase is Phase.SPARE for health in self.fleet)
        dead = sum(health.phase in GONE for health in self.fleet)
        in_service = len(self.names) - spares - dead
        assert in_service == min(in_service + spares, self.serving or len(self.names)), (
            "a spare waits beside a free place"
        )
        for caller in self.callers.values():
            assert caller.deaths <= self.config.request_retries or caller.place == LEFT
            if caller.place == WAITING and any(self.can_serve(name, caller.asked) for name in self.names):
                exact = caller.asked.exact_version
                if exact and any(each.phase is Phase.SWAPPING and each.version == exact for each in self.fleet):
                    continue  # it waits until that has changed over
                raise AssertionError("it waits for nothing")

    def check_quiet(self) -> None:
        """What must hold once nothing is under way and nothing went wrong on the last stretch."""
        wanted = self.plan.wanted
        for health in self.fleet:
            assert self.dispatcher.load(health.name) == self.dispatcher.in_flight(health.name) == 0
        versions = [self.fleet[name].version for name in self.movable]
        assert {*versions} <= {*wanted} or not wanted
        if len(versions) >= len(wanted) > 0:
            assert {*versions} == {*wanted}, "every wanted version is served"
            assert all(versions.count(version) == 1 for version in wanted[:-1]), "the others serve the newest"
            assert all(pull.done for pull in self.pulls)
        if self.anyone_serves or self.fleet.is_given_up:
            for caller in self.callers.values():
                allowed = any(map(caller.asked.allows, wanted))  # not if an older version is wanted now
                assert caller.place == LEFT or (not allowed and not self.fleet.is_given_up)

    def check_settled(self, version: PolicyVersion) -> None:
        on_their_way = {pulls for name, pulls in self.syncs.items() if name not in self.late}
        assert version not in on_their_way
        if not any(health.phase.serves and health.version == version for health in self.fleet):
            assert not self.movable and all(health.phase is not Phase.DEAD for health in self.fleet), (
                "somebody is to come"
            )

    def check_home(self, caller: Caller, name: str, home: str | None) -> None:
        if not isinstance(self.strategy, StickySession) or home in (None, name):
            return
        assert home is not None
        assert not self.can_serve(home, caller.asked), "a session stays where it can be served"
