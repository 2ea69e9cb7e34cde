"""Versions that are wanted at once: each is served while it is wanted, and every request by exactly its version."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from routing_examples import completion, request

from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Assignment, Dispatcher
from titan_rl.routing.health import Fleet, Phase
from titan_rl.routing.strategies import LeastLoaded, RoundRobin, StickySession
from titan_rl.routing.version_plan import VersionPlan
from titan_rl.types import FinishReason, PolicyVersion


def v(step: int) -> PolicyVersion:
    return PolicyVersion(0, step)


class World:
    """A fleet, its dispatcher, and groups of several turns, each of which wants one version from start to end. A group
    begins once its version is served and holds one of a few places until it ends, as programs do."""

    def __init__(
        self,
        generators: int,
        strategy: RoundRobin | LeastLoaded | StickySession,
        rng: random.Random,
        serving: int | None = None,
        places: int = 1000,
    ) -> None:
        self.rng = rng
        self.fleet = Fleet(strategy, serving=serving)
        self.plan = VersionPlan(self.fleet, RouterConfig())
        self.dispatcher = Dispatcher(strategy, self.fleet, RouterConfig(request_retries=1000))
        for index in range(generators):
            self.fleet.join(f"g{index}")
        self.groups: dict[str, tuple[PolicyVersion, int]] = {}  # version, turns that are left
        self.places = places
        self.unserved: list[str] = []  # groups whose version was not served yet
        self.queue: list[str] = []  # groups that have begun and have no place
        self.holders: set[str] = set()
        self.live: dict[str, Assignment] = {}
        self.draining: set[str] = set()
        self.pulling: dict[str, PolicyVersion] = {}
        self.sent = 0
        self.changes = 0
        self.plan.want([v(0)])
        self.advance()

    def advance(self) -> None:
        self.take(self.dispatcher.reconsider())
        self.draining |= set(self.plan.begin(self.dispatcher))
        served = [group for group in self.unserved if self.groups[group][0] in self.fleet.served]
        self.unserved = [group for group in self.unserved if group not in served]
        self.queue += served
        while self.queue and len(self.holders) < self.places:
            group = self.queue.pop(0)
            self.holders.add(group)
            self.turn(group)
            self.draining |= set(self.plan.begin(self.dispatcher))

    def take(self, assignments: list[Assignment]) -> None:
        for each in assignments:
            assert self.fleet[each.generator].phase.serves
            assert self.fleet[each.generator].version == each.request.exact_version
            self.live[each.request.request_id] = each

    def turn(self, group: str) -> None:
        version, left = self.groups[group]
        self.groups[group] = (version, left - 1)
        self.sent += 1
        asked = replace(request(f"{group}.{self.sent}", session=group), exact_version=version)
        self.take(self.dispatcher.submit([asked]))

    def admit(self, step: int, count: int) -> None:
        self.plan.want([*self.plan.wanted, v(step)])
        for _ in range(count):
            self.sent += 1
            group = f"{step}-{self.sent}"
            self.groups[group] = (v(step), self.rng.randint(1, 3))
            self.unserved.append(group)
        self.retire()
        self.advance()

    def retire(self) -> None:
        self.plan.want({version for version, _ in self.groups.values()} or self.plan.wanted[-1:])

    def end_a_request(self) -> None:
        request_id = self.rng.choice(list(self.live))
        assignment = self.live.pop(request_id)
        assert self.fleet[assignment.generator].version == assignment.request.exact_version, (
            "it may not change meanwhile"
        )
        self.dispatcher.completed(request_id, completion(assignment.request, 1, FinishReason.STOP))
        group = request_id.partition(".")[0]
        version, left = self.groups[group]
        if left:
            self.turn(group)
        else:
            del self.groups[group]
            self.holders.remove(group)
            self.retire()
        self.advance()

    def begin_a_pull(self) -> None:
        name = self.rng.choice(sorted(each for each in self.draining if not self.dispatcher.in_flight(each)))
        self.draining.remove(name)
        self.pulling[name] = self.plan.pulling(name)

    def end_a_pull(self) -> None:
        name = self.rng.choice(sorted(self.pulling))
        self.plan.verified(name, self.pulling.pop(name))
        self.changes += 1
        self.advance()

    def die(self) -> None:
        name = self.rng.choice([health.name for health in self.fleet])
        self.fleet.died(name, "killed")
        self.draining.discard(name)
        self.pulling.pop(name, None)
        for request_id in [each for each, assignment in self.live.items() if assignment.generator == name]:
            del self.live[request_id]
            self.dispatcher.lost(request_id, died="killed")
        self.advance()

    def leave_out(self) -> None:
        """No replacement comes for a dead one, if another one lives or is to come."""
        there = [health.name for health in self.fleet if health.phase is not Phase.GIVEN_UP]
        if len(there) > 1 and (dead := [health.name for health in self.fleet if health.phase is Phase.DEAD]):
            self.fleet.give_up(self.rng.choice(dead), "it was taken away")
            self.advance()

    def replace(self) -> None:
        self.fleet.join(self.rng.choice([health.name for health in self.fleet if health.phase is Phase.DEAD]))
        self.advance()

    def possible(self) -> list:
        events = [self.end_a_request] * bool(self.live) + [self.end_a_pull] * bool(self.pulling)
        events += [self.replace] * any(health.phase is Phase.DEAD for health in self.fleet)
        return events + [self.begin_a_pull] * any(not self.dispatcher.in_flight(each) for each in self.draining)


@settings(max_examples=200, deadline=None)
@given(
    generators=st.integers(1, 4),
    strategy=st.sampled_from([RoundRobin, LeastLoaded, StickySession]),
    steps=st.integers(1, 8),
    serving=st.sampled_from([None, 1, 2]),
    deaths=st.integers(0, 6),
    places=st.sampled_from([1, 2, 4, 1000]),
    seed=st.integers(0, 2**32),
)
def test_every_request_is_served_by_its_version_in_the_end(
    generators: int, strategy, steps: int, serving: int | None, deaths: int, places: int, seed: int
) -> None:
    """Though generators die, if one is left or comes, and though groups of one version hold the places that those of
    another one wait for."""
    rng = random.Random(seed)
    world = World(generators, strategy(), rng, serving, places)
    step = 0
    while step < steps or world.groups:
        events = world.possible()
        # At most three versions at once, as a run with max_staleness 2 has them.
        if step < steps and (not events or rng.random() < 0.2) and len({each for each, _ in world.groups.values()}) < 3:
            world.admit(step, rng.randint(0, 4))
            step += 1
            continue
        if step and rng.random() < 0.02:
            world.admit(rng.randrange(step), 1)  # a group that was lost
            continue
        if deaths and rng.random() < 0.1:
            deaths -= 1
            world.die()
            if rng.random() < 0.3:
                world.leave_out()
            continue
        assert events, f"nothing can happen any more: {world.fleet.describe()}, {world.groups}"
        rng.choice(events)()
    assert world.dispatcher.waiting == sum(world.dispatcher.in_flight(health.name) for health in world.fleet) == 0
