"""Dispatcher, fleet and strategies together, as the router runs them, under random schedules.

What must hold after every event is in `RouterBooks.check`; what must hold once nothing more goes wrong is in
`RouterBooks.check_quiet`.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from router_books import LEFT, LIVE
from router_driver import RouterDriver
from routing_examples import request

from titan_rl.routing.config import RouterConfig
from titan_rl.routing.health import Phase
from titan_rl.routing.strategies import LeastLoaded, build_strategy
from titan_rl.types import FinishReason, PolicyVersion

SESSIONS = ["s0", "s1", "s2", "s3"]

# How one attempt ends: tokens (cut to what is left of its budget) and reason.
ANSWERS = st.one_of(
    st.tuples(st.integers(1, 5), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])),
    st.tuples(st.sampled_from([0, 1, 2, 99]), st.just(FinishReason.ABORT)),
)


OUTCOMES = st.sampled_from(["verified"] * 4 + ["failed"] * 4 + ["died"])


class RouterMachine(RuleBasedStateMachine):
    """Random arrivals, answers, interruptions, losses, pulls, sleeps and deaths."""

    driver: RouterDriver

    @initialize(
        strategy=st.sampled_from(["round_robin", "least_loaded", "sticky_session"]),
        generators=st.integers(1, 4),
        weight_sync=st.sampled_from(["drain", "hot_swap"]),
        max_syncing=st.integers(0, 2),
        pull_retries=st.integers(0, 2),
        resume=st.booleans(),
        request_retries=st.integers(0, 2),
        serving=st.sampled_from([None, None, 1, 2]),
        started=st.sampled_from([True, True, False]),
    )
    def start(self, strategy: str, generators: int, started: bool, **options: Any) -> None:
        self.driver = RouterDriver(build_strategy(RouterConfig(strategy=strategy)), generators=generators, **options)
        self.serial = 0
        if started:
            self.driver.pull(PolicyVersion(0, 0))
            self.driver.become_quiet()

    # Requests.

    @rule(
        sessions=st.lists(st.none() | st.sampled_from(SESSIONS), min_size=1, max_size=4),
        prompt=st.integers(1, 4),
        behind=st.integers(0, 1),
    )
    def requests_arrive(self, sessions: list[str | None], prompt: int, behind: int) -> None:
        target = self.driver.newest or PolicyVersion(0, 0)
        at_least = target._replace(step=max(0, target.step - behind))
        fresh = []
        for session in sessions:
            fresh.append(request(f"r{self.serial}", prompt=prompt, session=session, at_least=at_least))
            self.serial += 1
        self.driver.arrive(fresh)

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def attempts_are_answered(self, data: st.DataObject) -> None:
        attempts = data.draw(st.lists(st.sampled_from(list(self.driver.live)), min_size=1, max_size=3, unique=True))
        self.driver.answer([(attempt, *data.draw(ANSWERS)) for attempt in attempts])

    @precondition(lambda self: self.driver.plan.wanted)
    @rule(data=st.data(), sessions=st.lists(st.none() | st.sampled_from(SESSIONS), min_size=1, max_size=3))
    def requests_for_an_exact_version_arrive(self, data: st.DataObject, sessions: list[str | None]) -> None:
        version = data.draw(st.sampled_from(self.driver.plan.wanted))
        self.driver.arrive([request(f"r{self.serial + i}", session=s, exact=version) for i, s in enumerate(sessions)])
        self.serial += len(sessions)

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def a_request_is_refused(self, data: st.DataObject) -> None:
        self.driver.refuse(data.draw(st.sampled_from(list(self.driver.live))))

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def an_attempt_is_lost(self, data: st.DataObject) -> None:
        self.driver.lose([data.draw(st.sampled_from(list(self.driver.live)))])

    @precondition(lambda self: self.driver.callers)
    @rule(data=st.data())
    def a_caller_gives_up(self, data: st.DataObject) -> None:
        callers = self.driver.callers
        open_ones = [request_id for request_id, caller in callers.items() if caller.place != LEFT]
        self.driver.abort(data.draw(st.sampled_from(open_ones or list(callers))))

    # Weights.

    @rule(change=st.sampled_from(["newer", "newer", "same", "older", "incarnation"]), beside=st.booleans())
    def other_versions_are_wanted(self, change: str, beside: bool) -> None:
        """The newest version is another one; the newest before stays beside it, or does not."""
        before = self.driver.newest
        incarnation, step = before or (0, 1)
        match change:
            case "newer":
                step += 1
            case "older":
                step = max(0, step - 1)
            case "incarnation":
                incarnation, step = incarnation + 1, max(0, step - 2)
        self.driver.pull(PolicyVersion(incarnation, step), *([before] if beside and before else []))

    @precondition(lambda self: any(map(self.driver.can_begin, self.driver.syncs)))
    @rule(data=st.data())
    def a_pull_begins(self, data: st.DataObject) -> None:
        able = [name for name in self.driver.syncs if self.driver.can_begin(name)]
        self.driver.begin_pull(data.draw(st.sampled_from(able)))

    @precondition(lambda self: any(self.driver.syncs.values()))
    @rule(data=st.data(), outcome=OUTCOMES)
    def a_pull_ends(self, data: st.DataObject, outcome: str) -> None:
        pulling = [name for name, version in self.driver.syncs.items() if version is not None]
        self.driver.end_pull(data.draw(st.sampled_from(pulling)), outcome)

    @precondition(lambda self: self.driver.syncs)
    @rule(data=st.data())
    def a_sync_is_late(self, data: st.DataObject) -> None:
        self.driver.is_late(data.draw(st.sampled_from(sorted(self.driver.syncs))))

    @precondition(lambda self: any(version is None for version in self.driver.syncs.values()))
    @rule(data=st.data(), outcome=OUTCOMES)
    def a_sync_runs_through(self, data: st.DataObject, outcome: str) -> None:
        """Rarely reached by single events alone: what comes after many syncs."""
        name = data.draw(st.sampled_from([n for n, version in self.driver.syncs.items() if version is None]))
        if not self.driver.can_begin(name):
            self.driver.drain_deadline(name)
        if self.driver.can_begin(name):
            self.driver.begin_pull(name)
        if self.driver.syncs.get(name) is not None:
            self.driver.end_pull(name, outcome)

    @rule(data=st.data())
    def a_drain_takes_too_long(self, data: st.DataObject) -> None:
        draining = [n for n, version in self.driver.syncs.items() if version is None and self.driver.live_on(n)]
        if draining:
            self.driver.drain_deadline(data.draw(st.sampled_from(draining)))

    @rule(data=st.data())
    def a_generator_sleeps(self, data: st.DataObject) -> None:
        self.driver.sleep(data.draw(st.sampled_from(self.driver.names)))

    @rule(data=st.data())
    def a_generator_is_woken(self, data: st.DataObject) -> None:
        self.driver.wake(data.draw(st.sampled_from(self.driver.names)))

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def a_generator_with_requests_dies(self, data: st.DataObject) -> None:
        assignment, _ = self.driver.live[data.draw(st.sampled_from(list(self.driver.live)))]
        self.driver.lose(self.driver.live_on(assignment.generator), fatal=True)

    @rule(data=st.data())
    def a_generator_dies(self, data: st.DataObject) -> None:
        self.driver.die(data.draw(st.sampled_from(self.driver.names)))

    @rule(data=st.data())
    def a_replacement_joins(self, data: st.DataObject) -> None:
        self.driver.join(data.draw(st.sampled_from(self.driver.names)))

    @precondition(lambda self: any(health.phase is Phase.DEAD for health in self.driver.fleet))
    @rule(data=st.data())
    def a_dead_generator_is_left_out(self, data: st.DataObject) -> None:
        dead = [health.name for health in self.driver.fleet if health.phase is Phase.DEAD]
        self.driver.leave_out(data.draw(st.sampled_from(dead)))

    @rule()
    def everything_becomes_quiet(self) -> None:
        self.driver.become_quiet()

    @invariant()
    def the_books_agree(self) -> None:
        self.driver.check()


TestRouterSchedules = RouterMachine.TestCase
TestRouterSchedules.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)


@given(
    generators=st.integers(1, 4),
    max_syncing=st.integers(0, 2),
    weight_sync=st.sampled_from(["drain", "hot_swap"]),
    ready=st.booleans(),
    choices=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_everybody_is_served_though_every_pull_is_overtaken(
    generators: int, max_syncing: int, weight_sync: str, ready: bool, choices: list[int]
) -> None:
    driver = RouterDriver(LeastLoaded(), generators=generators, max_syncing=max_syncing, weight_sync=weight_sync)
    if ready:
        driver.pull(PolicyVersion(0, 0))
        driver.become_quiet()
    step = 1
    driver.pull(PolicyVersion(0, step))
    for turn, choice in enumerate(choices):
        newest = PolicyVersion(0, step)
        driver.arrive([request(f"r{turn}", at_least=newest)])
        for name in list(driver.syncs):
            if not driver.can_begin(name):
                driver.deliver([attempt_id for attempt_id in driver.live_on(name)])
            driver.begin_pull(name)
        step += 1
        driver.pull(PolicyVersion(0, step))
        pulling = [name for name, version in driver.syncs.items() if version is not None]
        driver.end_pull(pulling[choice % len(pulling)], "verified")
        driver.check()
        assert driver.callers[f"r{turn}"].place in (LIVE, LEFT), "it asked for no more than what was verified"
        for name in pulling:
            if name in driver.syncs and driver.syncs[name] is not None:
                driver.end_pull(name, "verified")
    oldest = min(health.version or PolicyVersion(-1, 0) for health in driver.fleet)
    assert oldest.step >= step - 2 * generators, "nobody is left behind"
