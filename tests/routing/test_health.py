"""There is no way to SERVING but through a verified pull; who is in the fleet, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_examples import V0, V1, V2, comes_to_serve

from titan_rl.errors import GeneratorNotServing
from titan_rl.routing.health import Fleet, GeneratorHealth, Kind, Phase
from titan_rl.types import PolicyVersion

EVENTS: dict[str, Callable[[GeneratorHealth], None]] = {
    "sync": lambda health: health.sync(V2),
    "swap": lambda health: health.sync(V2, swap=True),
    "verified": lambda health: health.verified(V2),
    "failed": lambda health: health.failed("bad bytes"),
    "late": lambda health: health.late("too slow"),
    "sleep": lambda health: health.sleep(),
    "wake": lambda health: health.wake(),
    "die": lambda health: health.died("killed"),
    "give up": lambda health: health.give_up("killed too often"),
}

REFUSED = None
P = Phase

# What each event makes of each phase. Columns in the order of EVENTS.
TABLE: dict[Phase, tuple[Phase | None, ...]] = {
    P.RECOVERING: (P.PULLING, REFUSED, REFUSED, REFUSED, P.RECOVERING, P.ASLEEP, REFUSED, P.DEAD, P.GIVEN_UP),
    P.SERVING: (P.DRAINING, P.SWAPPING, REFUSED, REFUSED, P.SERVING, P.ASLEEP, REFUSED, P.DEAD, P.GIVEN_UP),
    P.DRAINING: (REFUSED, REFUSED, P.SERVING, P.STALE, P.LATE, REFUSED, REFUSED, P.DEAD, P.GIVEN_UP),
    P.PULLING: (REFUSED, REFUSED, P.SERVING, P.STALE, P.LATE, REFUSED, REFUSED, P.DEAD, P.GIVEN_UP),
    P.SWAPPING: (REFUSED, REFUSED, P.SERVING, P.STALE, P.LATE, REFUSED, REFUSED, P.DEAD, P.GIVEN_UP),
    P.LATE: (REFUSED, REFUSED, P.SERVING, P.STALE, P.LATE, REFUSED, REFUSED, P.DEAD, P.GIVEN_UP),
    P.STALE: (P.PULLING, REFUSED, REFUSED, REFUSED, P.STALE, P.ASLEEP, REFUSED, P.DEAD, P.GIVEN_UP),
    P.ASLEEP: (REFUSED, REFUSED, REFUSED, REFUSED, P.ASLEEP, REFUSED, P.RECOVERING, P.DEAD, P.GIVEN_UP),
    P.SPARE: (REFUSED, REFUSED, REFUSED, REFUSED, P.SPARE, REFUSED, REFUSED, P.DEAD, P.GIVEN_UP),
    P.DEAD: (REFUSED, REFUSED, REFUSED, REFUSED, P.DEAD, REFUSED, REFUSED, P.DEAD, P.GIVEN_UP),
    P.GIVEN_UP: (REFUSED, REFUSED, REFUSED, REFUSED, P.GIVEN_UP, REFUSED, REFUSED, P.GIVEN_UP, P.GIVEN_UP),
}


class Candidates:
    """Remembers what a strategy would: who serves which version."""

    def __init__(self) -> None:
        self.serving: dict[str, PolicyVersion] = {}

    def serves(self, name: str, version: PolicyVersion) -> None:
        self.serving[name] = version

    def pauses(self, name: str) -> None:
        self.serving.pop(name, None)


def fleet_of(*names: str, serving: int | None = None) -> Fleet:
    fleet = Fleet(Candidates(), serving=serving)
    for name in names:
        fleet.join(name)
    return fleet


def phases(fleet: Fleet) -> list[Phase]:
    return [health.phase for health in fleet]


def test_the_table_speaks_of_every_phase() -> None:
    assert set(TABLE) == set(Phase)


@given(start=st.sampled_from([Phase.RECOVERING, Phase.SPARE]), events=st.lists(st.sampled_from(list(EVENTS))))
def test_every_event_leads_where_the_table_says_and_the_strategy_hears_of_it(start: Phase, events: list[str]) -> None:
    candidates = Candidates()
    health = GeneratorHealth("g0", candidates, Kind(start))
    for event in events:
        before = health.phase
        expected = TABLE[before][list(EVENTS).index(event)]
        if expected is REFUSED:
            with pytest.raises((ValueError, GeneratorNotServing), match="cannot"):
                EVENTS[event](health)
            expected = before
        else:
            EVENTS[event](health)
        assert health.phase is expected
        assert health.kind.is_syncing == (expected in (P.DRAINING, P.PULLING, P.SWAPPING, P.LATE))
        assert list(candidates.serving) == (["g0"] if expected in (P.SERVING, P.SWAPPING) else [])
        assert health.phase.serves == bool(candidates.serving)


def test_the_reason_of_a_stale_or_dead_generator_is_the_first_one_and_goes_once_it_serves() -> None:
    fleet = fleet_of("g0")
    fleet["g0"].sync(V0)
    fleet["g0"].failed("fingerprint of lm_head.weight")
    assert fleet["g0"].reason == "fingerprint of lm_head.weight"
    comes_to_serve(fleet, "g0", V1)
    assert fleet["g0"].reason == ""
    fleet.died("g0", "killed")
    fleet.died("g0", "a later symptom")
    assert fleet["g0"].reason == fleet.describe().removeprefix("g0: ") == "killed"


def test_a_woken_generator_must_be_woken_until_a_pull_is_verified() -> None:
    fleet = fleet_of("g0")
    comes_to_serve(fleet, "g0", V0)
    fleet["g0"].sleep()
    fleet["g0"].wake()
    fleet["g0"].sync(V0)
    fleet["g0"].failed("bad bytes")
    assert fleet["g0"].must_wake
    comes_to_serve(fleet, "g0", V0)
    assert not fleet["g0"].must_wake


@pytest.mark.parametrize("phase", ["spare", "serving", "recovering"])
def test_who_is_not_asleep_cannot_be_woken_and_says_why(phase: str) -> None:
    with pytest.raises(GeneratorNotServing, match=f"g0 cannot be woken: it is {phase}"):
        GeneratorHealth("g0", Candidates(), Kind(Phase(phase))).wake()


def test_who_changes_its_weights_cannot_be_put_to_sleep() -> None:
    fleet = fleet_of("g0")
    comes_to_serve(fleet, "g0", V0)
    fleet["g0"].sync(V1, swap=True)
    with pytest.raises(GeneratorNotServing, match="g0 cannot be put to sleep: it is in a change of weights"):
        fleet["g0"].sleep()


# --- who is there ----------------------------------------------------------------------------------------------------


def test_a_fleet_is_given_up_only_when_every_generator_is() -> None:
    fleet = fleet_of("g0", "g1")
    assert not fleet_of().is_given_up
    for name in ("g0", "g1"):
        fleet.died(name, "killed")
    assert not fleet.is_given_up, "replacements will come"
    fleet.give_up("g0", "killed three times")
    assert not fleet.is_given_up
    fleet.give_up("g1", "killed three times")
    assert fleet.is_given_up
    assert fleet.describe() == "g0: killed three times; g1: killed three times"
    fleet.join("g1")
    assert not fleet.is_given_up


def test_a_generator_that_was_dead_before_this_router_may_be_given_up() -> None:
    fleet = fleet_of()
    fleet.give_up("g0", "it never came up")
    assert fleet.is_given_up


def test_a_replacement_has_nothing_of_the_dead_one() -> None:
    fleet = fleet_of("g0")
    with pytest.raises(ValueError, match="g0 is already in the fleet"):
        fleet.join("g0")
    comes_to_serve(fleet, "g0", V1)
    fleet["g0"].sync(V2)
    fleet["g0"].failed("bad bytes")
    fleet.died("g0", "killed")
    fleet.join("g0")
    assert fleet["g0"] == GeneratorHealth("g0", Candidates())


def test_a_spare_takes_the_place_of_a_dead_generator_and_its_replacement_is_the_spare() -> None:
    fleet = fleet_of("g0", "g1", "g2", serving=2)
    assert phases(fleet) == [P.RECOVERING, P.RECOVERING, P.SPARE]
    fleet.died("g0", "killed")
    assert phases(fleet) == [P.DEAD, P.RECOVERING, P.RECOVERING]
    fleet.join("g0")
    assert phases(fleet) == [P.SPARE, P.RECOVERING, P.RECOVERING]
    fleet.died("g0", "killed in its sleep")
    assert phases(fleet) == [P.DEAD, P.RECOVERING, P.RECOVERING]
    fleet.join("g0")
    fleet.resize(3)
    assert phases(fleet) == [P.RECOVERING] * 3


def test_a_generator_that_was_put_to_sleep_keeps_its_place() -> None:
    fleet = fleet_of("g0", "g1", serving=1)
    comes_to_serve(fleet, "g0")
    fleet["g0"].sleep()
    assert phases(fleet) == [P.ASLEEP, P.SPARE]
    fleet.died("g0", "killed")
    assert phases(fleet) == [P.DEAD, P.RECOVERING]
