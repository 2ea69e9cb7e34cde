"""A session stays on its generator, waits for it for a short time, and is never forgotten while it is in use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_examples import V0, V1, comes_to_serve, completion, request, serving

from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Assignment, Dispatcher
from titan_rl.routing.health import Fleet
from titan_rl.routing.strategies import StickySession, build_strategy
from titan_rl.types import FinishReason

WAIT_SECONDS = 5.0


def sticky_fleet(count: int, **options: Any) -> tuple[StickySession, Fleet, Dispatcher]:
    strategy = StickySession(**{"sync_wait_seconds": WAIT_SECONDS} | options)
    return strategy, *serving(strategy, count)


def turn(dispatcher: Dispatcher, request_id: str, session: str | None, now: float = 0.0, **options: Any) -> str:
    """A request of the session comes and is live; returns where."""
    (assignment,) = dispatcher.submit([request(request_id, session=session, **options)], now)
    return assignment.generator


def finish(dispatcher: Dispatcher, request_id: str) -> None:
    assert dispatcher.completed(request_id, completion(request(request_id), 1, FinishReason.STOP), 0.0) is not None


def where(assignments: list[Assignment]) -> list[str]:
    return [assignment.generator for assignment in assignments]


def test_a_session_that_waited_long_enough_is_pinned_anew_and_stays() -> None:
    strategy, fleet, dispatcher = sticky_fleet(2)
    home = turn(dispatcher, "m0", "mine")
    finish(dispatcher, "m0")
    fleet[home].sync(V1)
    dispatcher.submit([request("m1", session="mine"), request("m2", session="mine")], 10.0)
    dispatcher.submit([request("m3", session="mine")], 12.0)
    assert dispatcher.wake_at == 15.0, "the earliest of all waits"
    assert dispatcher.reconsider(14.9) == []
    (new_home,) = set(where(dispatcher.reconsider(15.0)))
    assert new_home != home
    assert dispatcher.waiting == 0, "its other requests need not wait any more: the session serves elsewhere now"
    fleet[home].verified(V1)
    assert turn(dispatcher, "m4", "mine", now=20.0) == new_home == strategy.generator_of("mine")


def test_a_session_waits_while_its_generator_serves_an_older_version_than_it_asks_for() -> None:
    _, fleet, dispatcher = sticky_fleet(2)
    home = turn(dispatcher, "m0", "mine")
    other = ({"g0", "g1"} - {home}).pop()
    comes_to_serve(fleet, other, V1)
    assert dispatcher.submit([request("m1", session="mine", at_least=V1)], 0.0) == []
    assert where(dispatcher.reconsider(WAIT_SECONDS)) == [other]
    assert turn(dispatcher, "m2", "mine", at_least=V0) == other


@pytest.mark.parametrize("event", ["stale", "stale after serving", "stale and tried again", "dead"])
def test_a_session_is_pinned_anew_at_once_when_its_generator_is_gone(event: str) -> None:
    _, fleet, dispatcher = sticky_fleet(2)
    home = turn(dispatcher, "m0", "mine")
    if event == "dead":
        fleet.died(home, "killed")
    else:
        fleet[home].sync(V1, swap=event != "stale")
        fleet[home].failed("bad bytes")
        if event == "stale and tried again":
            fleet[home].sync(V1)
    new_home = turn(dispatcher, "m1", "mine")
    assert new_home != home
    if event == "stale and tried again":
        fleet[home].verified(V1)
    elif event != "dead":
        comes_to_serve(fleet, home, V1)
    finish(dispatcher, "m0")
    assert turn(dispatcher, "m2", "mine") == new_home, "the end of an earlier request does not bring it back"


@given(data=st.data(), bound=st.integers(1, 4))
def test_sessions_without_live_requests_are_forgotten_least_recently_used_first(
    data: st.DataObject, bound: int
) -> None:
    strategy, _, dispatcher = sticky_fleet(3, max_sessions=bound)
    live: dict[str, list[str]] = {}
    idle: dict[str, str] = {}  # session → generator, least recently used first
    homes: dict[str, str] = {}
    for serial in range(data.draw(st.integers(0, 40))):
        session = data.draw(st.sampled_from("abcdefgh"))
        if live.get(session) and data.draw(st.booleans()):
            finish(dispatcher, live[session].pop(0))
            if not live[session]:
                del live[session]
                idle[session] = homes[session]
                while len(idle) > bound:
                    del idle[next(iter(idle))]
        else:
            home = turn(dispatcher, f"r{serial}", session)
            if session in live or session in idle:
                assert home == homes[session]
            idle.pop(session, None)
            homes[session] = home
            live.setdefault(session, []).append(f"r{serial}")
        for remembered in "abcdefgh":
            expected = homes[remembered] if remembered in live or remembered in idle else None
            assert strategy.generator_of(remembered) == expected


def test_an_ended_session_with_live_requests_is_forgotten_after_the_last() -> None:
    strategy, _, dispatcher = sticky_fleet(2)
    home = turn(dispatcher, "m0", "mine")
    turn(dispatcher, "m1", "mine")
    strategy.end_session("mine")
    finish(dispatcher, "m0")
    assert strategy.generator_of("mine") == home
    finish(dispatcher, "m1")
    assert strategy.generator_of("mine") is None


def test_the_config_names_the_bounds() -> None:
    config = RouterConfig(strategy="sticky_session", strategy_kwargs={"max_sessions": 7, "sync_wait_seconds": 0.5})
    assert isinstance(build_strategy(config), StickySession)
