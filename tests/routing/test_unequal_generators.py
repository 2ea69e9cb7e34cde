"""Generators of different size and speed in one fleet: who gets how much, and who follows one that dies (1 s).

The engines are planned ones, which do what simulated ones do on a clock of their own.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_examples import V0, comes_to_serve, request

from titan_rl.planner.scenario import EngineSpeed, LogNormal, PlannedEngine, Sequence
from titan_rl.routing.dispatcher import Assignment, Dispatcher
from titan_rl.routing.fleet import Fleet
from titan_rl.routing.generator import GeneratorState
from titan_rl.routing.strategies import LeastLoaded, RoundRobin, RoutingStrategy, StickySession


def dispatcher_of(strategy: RoutingStrategy, capacity: dict[str, float]) -> Dispatcher:
    """`plain` and the generators of `capacity`, all serving."""
    fleet = Fleet(strategy, serving=1, others=capacity)
    for name in ("plain", *capacity):
        fleet.joined(name)
        comes_to_serve(fleet, name)
    return Dispatcher(strategy, capacity=capacity)


def shares(assignments: list[Assignment]) -> Counter[str]:
    return Counter(each.generator for each in assignments)


class Served:
    """Completions of many lengths from engines of these speeds; what is asked when is up to the test."""

    def __init__(self, strategy: RoutingStrategy, speeds: dict[str, EngineSpeed]) -> None:
        plain = speeds["plain"].max_num_seqs
        sizes = {name: speed.max_num_seqs / plain for name, speed in speeds.items() if name != "plain"}
        self.dispatcher = dispatcher_of(strategy, sizes)
        self.engines = {name: PlannedEngine(speed, V0) for name, speed in speeds.items()}
        self.lengths = LogNormal(200, 0.8, most=1000)(0, 4000)
        self.tokens: Counter[str] = Counter()
        self.now = 0.0
        self._asked = 0

    def ask(self, count: int) -> None:
        asked = [request(str(self._asked + number), budget=1000) for number in range(count)]
        for each in self.dispatcher.submit(asked, self.now):
            length = self.lengths[int(each.request.request_id)]
            self.engines[each.generator].add(Sequence(each.request.request_id, 0, 0, length), self.now)
        self._asked += count

    def step(self) -> int:
        """To the next end of a request; returns how many ended."""
        name = min(self.engines, key=lambda name: self.engines[name].due)
        self.now = self.engines[name].due
        finished, _ = self.engines[name].boundary()
        for sequence in finished:
            self.tokens[name] += sequence.length
            self.dispatcher.ended(sequence.request_id)
        return len(finished)

    def at_once(self) -> float:
        """Tokens per second of 4,000 requests that come together, until the last one ends."""
        self.ask(4000)
        while self.dispatcher.live:
            self.step()
        return sum(self.tokens.values()) / self.now

    def one_by_one(self, in_flight: int) -> float:
        """Tokens per second of requests of which each comes when another has ended."""
        self.ask(in_flight)
        while self._asked < 4000:
            self.ask(min(self.step(), 4000 - self._asked))
        return sum(self.tokens.values()) / self.now


def alone(speed: EngineSpeed) -> float:
    return speed.max_num_seqs / speed.step_seconds(speed.max_num_seqs)


SLOW = EngineSpeed(seconds_per_step=0.01, max_num_seqs=16)


@pytest.mark.parametrize("strategy", [LeastLoaded, StickySession])
def test_requests_that_come_at_once_are_shared_out_by_size(strategy: type[RoutingStrategy]) -> None:
    dispatcher = dispatcher_of(strategy(), {"large": 4.0, "small": 0.5})
    got = shares(dispatcher.submit([request(str(number)) for number in range(550)], 0.0))
    assert got == {"plain": 100, "large": 400, "small": 50}


def test_round_robin_gives_all_the_same() -> None:
    dispatcher = dispatcher_of(RoundRobin(), {"large": 4.0})
    assert set(shares(dispatcher.submit([request(str(number)) for number in range(100)], 0.0)).values()) == {50}


@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), max_size=4), st.lists(st.integers(1, 60), max_size=40))
def test_nobody_is_more_than_one_request_ahead_of_its_share(sizes: list[float], prompts: list[int]) -> None:
    capacity = {f"g{number}": size for number, size in enumerate(sizes)}
    dispatcher = dispatcher_of(LeastLoaded(), capacity)
    dispatcher.submit([request(str(number), prompt=prompt) for number, prompt in enumerate(prompts)], 0.0)
    load = {name: dispatcher.load(name) / size for name, size in ({"plain": 1.0} | capacity).items()}
    costs = [prompt + 5 for prompt in prompts]
    for name, size in ({"plain": 1.0} | capacity).items():
        assert load[name] <= min(load.values()) + max(costs, default=0) / size


def test_a_fleet_of_a_large_and_a_small_generator_makes_what_both_make() -> None:
    fast = EngineSpeed(seconds_per_step=0.01, max_num_seqs=64)
    both = alone(SLOW) + alone(fast)
    fleet = Served(LeastLoaded(), {"plain": SLOW, "fast": fast})
    assert fleet.one_by_one(160) > 0.95 * both
    assert fleet.tokens["fast"] / fleet.tokens["plain"] == pytest.approx(4, rel=0.1)
    assert Served(LeastLoaded(), {"plain": SLOW, "fast": fast}).at_once() > 0.9 * both
    assert Served(RoundRobin(), {"plain": SLOW, "fast": fast}).at_once() < 0.5 * both


def test_a_faster_generator_of_the_same_size_gets_more_of_what_comes_one_by_one() -> None:
    fast = EngineSpeed(seconds_per_step=0.0025, max_num_seqs=16)
    fleet = Served(LeastLoaded(), {"plain": SLOW, "fast": fast})
    assert fleet.one_by_one(64) > 0.95 * (alone(SLOW) + alone(fast))
    assert fleet.tokens["fast"] > 3.5 * fleet.tokens["plain"]


def test_a_spare_takes_the_place_of_its_kind_only() -> None:
    fleet = Fleet(LeastLoaded(), serving=1, others={"large": 4.0})
    for name in ("g0", "large", "spare"):
        fleet.joined(name)
    assert [health.is_spare for health in fleet] == [False, False, True]
    fleet.died("large", "killed")
    assert fleet["spare"].is_spare
    fleet.joined("large")
    assert fleet["large"].state is GeneratorState.RECOVERING
    fleet.died("g0", "killed")
    assert fleet["spare"].state is GeneratorState.RECOVERING
    fleet.joined("g0")
    assert [health.name for health in fleet if health.is_spare] == ["g0"]
