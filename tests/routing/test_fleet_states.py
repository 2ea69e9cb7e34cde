"""There is no way to SERVING but through a verified pull, and no way back to an older version."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_examples import V0, V1, V2, comes_to_serve

from titan_rl.errors import GeneratorNotServing, WeightsError
from titan_rl.routing.fleet import Fleet
from titan_rl.routing.generator import GeneratorHealth, GeneratorState
from titan_rl.types import PolicyVersion

RECOVERING, SERVING, SYNCING, PINNED, ASLEEP, STALE, DEAD = GeneratorState

EVENTS: dict[str, Callable[[Fleet], None]] = {
    "sync": lambda fleet: fleet.move("g0", GeneratorState.SYNCING),
    "verified": lambda fleet: fleet.move("g0", GeneratorState.SERVING, version=V2),
    "verified, overtaken": lambda fleet: fleet.move("g0", GeneratorState.SERVING, version=V1),
    "failed": lambda fleet: fleet.move("g0", GeneratorState.STALE, reason="bad bytes"),
    "pin": lambda fleet: fleet.move("g0", GeneratorState.PINNED),
    "sleep": lambda fleet: fleet.move("g0", GeneratorState.ASLEEP),
    "die": lambda fleet: fleet.died("g0", "killed"),
}

REFUSED = None

# What each event makes of each state, while the fleet's target is v2. Columns in the order of EVENTS.
TABLE: dict[GeneratorState, tuple[GeneratorState | None, ...]] = {
    RECOVERING: (SYNCING, REFUSED, REFUSED, REFUSED, REFUSED, ASLEEP, DEAD),
    SERVING: (SYNCING, SERVING, SERVING, STALE, PINNED, ASLEEP, DEAD),
    SYNCING: (REFUSED, SERVING, SERVING, STALE, REFUSED, REFUSED, DEAD),
    PINNED: (SYNCING, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, DEAD),
    ASLEEP: (SYNCING, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, DEAD),
    STALE: (SYNCING, REFUSED, REFUSED, REFUSED, REFUSED, ASLEEP, DEAD),
    DEAD: (REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, DEAD),
}

# How a new generator comes to each state.
PATHS: dict[GeneratorState, list[str]] = {
    RECOVERING: [],
    SERVING: ["sync", "verified"],
    SYNCING: ["sync"],
    PINNED: ["sync", "verified", "pin"],
    ASLEEP: ["sleep"],
    STALE: ["sync", "failed"],
    DEAD: ["die"],
}


class Candidates:
    """Remembers what a strategy would: who serves which version."""

    def __init__(self) -> None:
        self.serving: dict[str, PolicyVersion] = {}
        self.may_return: set[str] = set()

    def serves(self, name: str, version: PolicyVersion) -> None:
        self.serving[name] = version

    def pauses(self, name: str) -> None:
        self.serving.pop(name, None)
        self.may_return.add(name)

    def leaves(self, name: str) -> None:
        self.serving.pop(name, None)
        self.may_return.discard(name)


def fleet_of(*names: str, target: PolicyVersion | None = None) -> Fleet:
    fleet = Fleet(Candidates())
    for name in names:
        fleet.joined(name)
    if target is not None:
        fleet.ask(target)
    return fleet


def test_the_table_speaks_of_every_state() -> None:
    assert set(TABLE) == set(PATHS) == set(GeneratorState)


@pytest.mark.parametrize("state", list(GeneratorState))
@pytest.mark.parametrize("event", list(EVENTS))
def test_every_event_leads_from_every_state_where_the_table_says(state: GeneratorState, event: str) -> None:
    candidates = Candidates()
    fleet = Fleet(candidates)
    fleet.joined("g0")
    for step in PATHS[state]:
        # On the way there nothing was newer than v1, so that the overtaken pull of v1 does not go back.
        fleet.move("g0", GeneratorState.SERVING, version=V1) if step == "verified" else EVENTS[step](fleet)
    assert fleet["g0"].state is state
    fleet.ask(V2)
    expected = TABLE[state][list(EVENTS).index(event)]
    if expected is REFUSED:
        with pytest.raises(ValueError, match=f"cannot go from {state} to"):
            EVENTS[event](fleet)
        expected = state
    else:
        EVENTS[event](fleet)
    assert fleet["g0"].state is expected
    assert fleet["g0"].is_awaited == (expected is DEAD)
    assert list(candidates.serving) == (["g0"] if expected is SERVING else [])


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["g0", "g1"]), st.sampled_from(sorted(EVENTS)), st.integers(0, 1)), max_size=40
    )
)
def test_nothing_comes_to_serve_but_through_a_verified_pull(
    events: list[tuple[str, str, int]],
) -> None:
    candidates = Candidates()
    fleet = Fleet(candidates)
    fleet.joined("g0")
    fleet.joined("g1")
    step = 1
    for name, event, newer in events:
        step += newer
        fleet.ask(PolicyVersion(0, step))
        before = fleet[name].state
        version = fleet[name].version
        try:
            match event:
                case "verified":
                    fleet.move(name, GeneratorState.SERVING, version=PolicyVersion(0, step))
                case "verified, overtaken":
                    fleet.move(name, GeneratorState.SERVING, version=PolicyVersion(0, step - 1))
                case "sync":
                    fleet.move(name, GeneratorState.SYNCING)
                case "failed":
                    fleet.move(name, GeneratorState.STALE, reason="bad bytes")
                case "pin":
                    fleet.move(name, GeneratorState.PINNED)
                case "sleep":
                    fleet.move(name, GeneratorState.ASLEEP)
                case "die":
                    fleet.died(name, "killed")
        except ValueError:
            assert fleet[name].state is before
        health = fleet[name]
        if health.state is SERVING and before is not SERVING:
            assert before is SYNCING and event.startswith("verified")
        if before is DEAD:
            assert health.state is DEAD
        assert version is None or (health.version is not None and health.version >= version)
        assert candidates.serving == {h.name: h.version for h in fleet if h.state is SERVING}
        assert all(h.state not in (STALE, DEAD) for h in fleet if h.name in candidates.may_return)


def test_a_verified_version_serves_though_the_fleet_was_asked_for_a_newer_one() -> None:
    fleet = fleet_of("g0", target=V1)
    fleet.move("g0", GeneratorState.SYNCING)
    fleet.ask(V2)
    fleet.move("g0", GeneratorState.SERVING, version=V1)
    assert (fleet["g0"].state, fleet["g0"].version) == (SERVING, V1)


def test_a_generator_never_goes_back_to_an_older_version() -> None:
    fleet = fleet_of("g0", target=V2)
    comes_to_serve(fleet, "g0", V2)
    with pytest.raises(ValueError, match="cannot go back from v2 to v1"):
        fleet.move("g0", GeneratorState.SERVING, version=V1)
    assert (fleet["g0"].state, fleet["g0"].version) == (SERVING, V2)


def test_an_older_target_is_refused_and_a_new_incarnation_is_newer_than_any_step() -> None:
    fleet = fleet_of("g0", target=PolicyVersion(0, 90))
    with pytest.raises(WeightsError, match="v89 is older than v90"):
        fleet.ask(PolicyVersion(0, 89))
    fleet.ask(PolicyVersion(1, 50))
    assert fleet.target == PolicyVersion(1, 50)


def test_a_failed_pull_leaves_it_stale_with_the_reason_until_a_later_one_is_verified() -> None:
    fleet = fleet_of("g0", target=V0)
    fleet.move("g0", GeneratorState.SYNCING)
    fleet.move("g0", GeneratorState.STALE, reason="fingerprint of lm_head.weight")
    assert (fleet["g0"].state, fleet["g0"].reason) == (STALE, "fingerprint of lm_head.weight")
    comes_to_serve(fleet, "g0", V1)
    assert (fleet["g0"].state, fleet["g0"].reason) == (SERVING, "")


def test_death_is_final_and_keeps_its_first_reason() -> None:
    fleet = fleet_of("g0")
    fleet.died("g0", "killed")
    fleet.died("g0", "a later symptom")
    assert (fleet["g0"].state, fleet["g0"].reason) == (DEAD, "killed")


def test_a_fleet_is_given_up_only_when_every_generator_is_left_out() -> None:
    fleet = fleet_of("g0", "g1", target=V0)
    assert not fleet_of().is_given_up
    for name in ("g0", "g1"):
        fleet.died(name, "killed")
    assert not fleet.is_given_up and not fleet.settled(V0) and not fleet.is_lost(V0), "replacements will come"
    fleet.left_out("g0", "killed three times")
    assert not fleet.is_given_up
    fleet.left_out("g1", "killed three times")
    assert fleet.is_given_up and fleet.settled(V0) and fleet.is_lost(V0)
    assert fleet.describe() == "g0: killed three times; g1: killed three times"
    fleet.joined("g1")
    assert not fleet.is_given_up


def test_a_generator_that_was_dead_before_this_router_may_be_left_out() -> None:
    fleet = fleet_of()
    fleet.left_out("g0", "it never came up")
    assert fleet.is_given_up


def test_a_replacement_has_nothing_of_the_dead_one() -> None:
    fleet = fleet_of("g0", "g1", target=V1)
    with pytest.raises(ValueError, match="g0 is already in the fleet"):
        fleet.joined("g0")
    comes_to_serve(fleet, "g0", V1)
    fleet["g0"].failures = 2
    fleet.died("g0", "killed")
    fleet.joined("g0")
    assert fleet["g0"] == GeneratorHealth("g0")
    assert fleet.startable(lambda name: 0) == ["g0", "g1"]
    assert fleet.goes_back("g0"), "it may have served another router, at any version"
    fleet.verified("g0", fleet.pulling("g0"))
    assert (fleet["g0"].state, fleet["g0"].version) == (SERVING, V1)


def test_a_spare_waits_asleep_and_takes_the_place_of_a_dead_one_at_once() -> None:
    fleet = Fleet(Candidates(), serving=2)
    for name in ("g0", "g1", "g2"):
        fleet.joined(name)
    fleet.ask(V0)
    assert fleet.startable(lambda name: 0) == ["g0", "g1"] and fleet["g2"].is_spare
    for name in ("g0", "g1"):
        fleet.verified(name, fleet.pulling(name))
    assert fleet.settled(V0)
    with pytest.raises(GeneratorNotServing, match="g2 cannot be woken: it is a spare"):
        fleet.wake("g2")
    fleet.died("g0", "killed")
    assert fleet.startable(lambda name: 0) == ["g2"] and not fleet["g2"].must_wake
    fleet.joined("g0")
    assert fleet["g0"].is_spare and fleet.startable(lambda name: 0) == []
    fleet.verified("g2", fleet.pulling("g2"))
    fleet.died("g0", "killed in its sleep")
    assert [health.state for health in fleet] == [DEAD, SERVING, SERVING]


def test_a_spare_takes_the_version_that_nobody_serves_any_more() -> None:
    fleet = Fleet(Candidates(), serving=2)
    for name in ("g0", "g1", "g2"):
        fleet.joined(name)
    fleet.ask(V0)
    fleet.ask_beside(V1)
    for name in fleet.startable(lambda name: 0):
        fleet.verified(name, fleet.pulling(name))
    assert [health.version for health in fleet] == [V0, V1, None]
    fleet.died("g0", "killed")
    assert not fleet.is_lost(V0)
    assert fleet.startable(lambda name: 0) == ["g2"]
    assert fleet.pulling("g2") == V0


def test_a_generator_that_was_put_to_sleep_keeps_its_place() -> None:
    fleet = Fleet(Candidates(), serving=1)
    fleet.joined("g0")
    fleet.ask(V0)
    comes_to_serve(fleet, "g0")
    fleet.sleep("g0")
    fleet.joined("g1")
    assert fleet["g1"].is_spare and not fleet["g0"].is_spare
    fleet.died("g0", "killed")
    assert fleet["g1"].state is RECOVERING
