"""A session stays on its generator while that one serves what it asks for."""

from __future__ import annotations

from typing import Any

import pytest
from routing_examples import V0, V1, comes_to_serve, completion, request, serving

from titan_rl.routing import strategies
from titan_rl.routing.dispatcher import Dispatcher
from titan_rl.routing.health import Fleet
from titan_rl.routing.strategies import StickySession
from titan_rl.types import FinishReason


def sticky_fleet(count: int) -> tuple[StickySession, Fleet, Dispatcher]:
    strategy = StickySession()
    return strategy, *serving(strategy, count)


def turn(dispatcher: Dispatcher, request_id: str, session: str | None, **options: Any) -> str:
    """A request of the session comes and is live; returns where."""
    (assignment,) = dispatcher.submit([request(request_id, session=session, **options)])
    return assignment.generator


def finish(dispatcher: Dispatcher, request_id: str) -> None:
    assert dispatcher.completed(request_id, completion(request(request_id), 1, FinishReason.STOP)) is not None


def test_a_session_stays_where_it_is_while_others_have_less_to_do() -> None:
    _, _, dispatcher = sticky_fleet(2)
    home = turn(dispatcher, "m0", "mine")
    assert {turn(dispatcher, f"m{number}", "mine") for number in range(1, 5)} == {home}
    assert turn(dispatcher, "r", None) != home


def test_a_session_whose_generator_changes_its_weights_goes_on_elsewhere_and_stays_there() -> None:
    strategy, fleet, dispatcher = sticky_fleet(2)
    home = turn(dispatcher, "m0", "mine")
    finish(dispatcher, "m0")
    fleet[home].sync(V1)
    new_home = turn(dispatcher, "m1", "mine")
    fleet[home].verified(V1)
    assert turn(dispatcher, "m2", "mine") == new_home == strategy.generator_of("mine") != home


def test_a_session_goes_where_the_version_is_that_it_asks_for() -> None:
    _, fleet, dispatcher = sticky_fleet(2)
    home = turn(dispatcher, "m0", "mine")
    other = ({"g0", "g1"} - {home}).pop()
    comes_to_serve(fleet, other, V1)
    assert turn(dispatcher, "m1", "mine", at_least=V1) == other
    assert turn(dispatcher, "m2", "mine", at_least=V0) == other


@pytest.mark.parametrize("event", ["stale", "stale after serving", "stale and tried again", "dead"])
def test_a_session_goes_on_elsewhere_when_its_generator_is_gone(event: str) -> None:
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


def test_sessions_are_forgotten_least_recently_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "MOST_SESSIONS", 2)
    strategy, _, dispatcher = sticky_fleet(3)
    for number, session in enumerate("abac"):
        turn(dispatcher, f"r{number}", session)
    assert [session for session in "abc" if strategy.generator_of(session)] == ["a", "c"]
