"""Which generator takes new weights when, and when requests may pass."""

from __future__ import annotations

from typing import Any

import pytest
from router_books import LEFT, LIVE, WAITING
from router_driver import RouterDriver
from routing_examples import V0, V1, V2, V3, request

from titan_rl.errors import GeneratorNotServing, WeightsError
from titan_rl.routing.generator import GeneratorState
from titan_rl.routing.strategies import LeastLoaded
from titan_rl.types import PolicyVersion


def router(generators: int, *, ready: bool = True, **options: Any) -> RouterDriver:
    driver = RouterDriver(LeastLoaded(), generators=generators, **options)
    if ready:
        driver.pull(V0)
        driver.become_quiet()
    return driver


def states(driver: RouterDriver) -> list[str]:
    return [health.state.value for health in driver.fleet]


def one_pull(driver: RouterDriver, name: str, outcome: str = "verified") -> None:
    driver.begin_pull(name)
    driver.end_pull(name, outcome)
    driver.check()


def test_requests_wait_until_somebody_serves_and_then_go_through() -> None:
    driver = router(2, ready=False)
    driver.arrive([request("r0"), request("r1")])
    assert [caller.place for caller in driver.callers.values()] == [WAITING, WAITING]
    driver.pull(V0)
    one_pull(driver, "g1")
    assert [caller.place for caller in driver.callers.values()] == [LIVE, LIVE]


def test_requests_wait_while_all_are_syncing_and_then_go_through() -> None:
    driver = router(1)
    driver.pull(V1)
    assert not driver.anyone_serves
    driver.arrive([request("r0", at_least=V1)])
    one_pull(driver, "g0")
    driver.become_quiet()
    assert driver.callers["r0"].place == LEFT


def test_requests_wait_while_all_are_dead_and_fail_once_no_replacement_is_to_come() -> None:
    driver = router(1)
    driver.pull(V1)
    driver.arrive([request("r0")])
    driver.begin_pull("g0")
    driver.end_pull("g0", "died")
    driver.arrive([request("r1")])
    assert {caller.place for caller in driver.callers.values()} == {WAITING}
    driver.leave_out("g0")
    assert {caller.place for caller in driver.callers.values()} == {LEFT}
    assert all(pull.done for pull in driver.pulls)


def test_a_request_waits_for_its_minimum_version_while_others_are_served() -> None:
    driver = router(2, max_syncing=1)
    driver.pull(V1)
    driver.arrive([request("old", at_least=V0), request("new", at_least=V1)])
    assert [driver.callers[name].place for name in ("old", "new")] == [LIVE, WAITING]
    one_pull(driver, "g0")
    assert driver.callers["new"].place == LIVE


def test_one_serves_while_the_other_syncs() -> None:
    driver = router(2, max_syncing=1)
    driver.pull(V1)
    assert states(driver) == ["syncing", "serving"]
    one_pull(driver, "g0")
    assert states(driver) == ["serving", "syncing"]
    one_pull(driver, "g1")
    assert [health.version for health in driver.fleet] == [V1, V1]


def test_new_generators_start_at_once_whatever_the_limit() -> None:
    driver = router(3, ready=False, max_syncing=1)
    driver.pull(V0)
    assert sorted(driver.syncs) == ["g0", "g1", "g2"]


def test_a_hot_swap_goes_on_serving() -> None:
    driver = router(2, mode="hot_swap", max_syncing=1)
    driver.pull(V1)
    assert states(driver) == ["serving", "serving"] and sorted(driver.syncs) == ["g0", "g1"]
    assert not driver.fleet.must_drain("g0")
    driver.arrive([request("r0")])
    assert driver.callers["r0"].place == LIVE
    one_pull(driver, "g0")
    assert [health.version for health in driver.fleet] == [V1, V0]


def test_overlapping_pulls_are_served_by_the_newest() -> None:
    driver = router(1)
    driver.pull(V1)
    driver.pull(V2)
    driver.begin_pull("g0")
    assert driver.syncs["g0"] == V2
    driver.end_pull("g0", "verified")
    assert all(pull.done for pull in driver.pulls) and driver.fleet["g0"].version == V2


def test_a_generator_that_is_overtaken_in_its_pull_serves_who_waits_and_then_pulls_again() -> None:
    driver = router(1)
    driver.pull(V1)
    driver.begin_pull("g0")
    driver.arrive([request("old", at_least=V1), request("new", at_least=V2)])
    driver.pull(V2)
    driver.end_pull("g0", "verified")
    driver.check()
    assert [driver.callers[each].place for each in ("old", "new")] == [LIVE, WAITING]
    assert states(driver) == ["syncing"] and not driver.can_begin("g0"), "what it has just taken on comes first"
    driver.deliver(["old"])
    one_pull(driver, "g0")
    assert driver.fleet["g0"].version == V2 and driver.callers["new"].place == LIVE


def test_an_idle_generator_takes_its_weights_before_a_busy_one() -> None:
    driver = router(3, max_syncing=1)
    driver.arrive([request("r0"), request("r1")])
    assert [driver.dispatcher.in_flight(name) for name in driver.names] == [1, 1, 0]
    driver.deliver(["r1"])
    driver.pull(V1)
    assert states(driver) == ["serving", "syncing", "serving"]
    one_pull(driver, "g1")
    one_pull(driver, "g2")
    assert states(driver) == ["syncing", "serving", "serving"] and driver.live_on("g0") == ["r0"]


def test_a_late_generator_is_not_waited_for_and_serves_once_its_pull_ends_well() -> None:
    driver = router(2, max_syncing=1)
    driver.pull(V1)
    driver.begin_pull("g0")
    driver.is_late("g0")
    assert states(driver) == ["stale", "syncing"] and driver.fleet["g0"].reason == "too slow"
    one_pull(driver, "g1")
    assert driver.pulls[-1].done
    driver.arrive([request("r0"), request("r1")])
    assert driver.dispatcher.in_flight("g0") == 0, "it might hold anything"
    driver.end_pull("g0", "verified")
    driver.check()
    assert states(driver) == ["serving", "serving"] and driver.fleet["g0"].version == V1


def test_a_late_pull_that_fails_is_tried_again_and_waited_for_as_long_as_nobody_serves() -> None:
    driver = router(1, retries=1)
    driver.pull(V1)
    driver.begin_pull("g0")
    driver.is_late("g0")
    assert not driver.pulls[-1].done and not driver.anyone_serves
    driver.end_pull("g0", "failed")
    assert states(driver) == ["syncing"]
    one_pull(driver, "g0")
    assert states(driver) == ["serving"] and driver.pulls[-1].done


def test_a_caller_is_answered_when_its_version_is_reached_though_a_newer_one_is_on_its_way() -> None:
    driver = router(1)
    driver.pull(V1)
    driver.begin_pull("g0")
    driver.pull(V2)
    driver.end_pull("g0", "verified")
    assert [pull.done for pull in driver.pulls[-2:]] == [True, False]


def test_a_caller_is_not_answered_while_a_generator_waits_for_its_place_in_a_rolling_update() -> None:
    driver = router(3, max_syncing=1)
    driver.pull(V1)
    asked = driver.pulls[-1]
    driver.begin_pull("g0")
    driver.pull(V2)
    driver.end_pull("g0", "verified")
    assert list(driver.syncs) == ["g1"] and not asked.done, "it has waited longer than g0, which serves v1"
    one_pull(driver, "g1")
    assert list(driver.syncs) == ["g2"] and not asked.done
    one_pull(driver, "g2")
    assert list(driver.syncs) == ["g0"] and asked.done


def test_an_older_version_of_the_same_incarnation_is_refused_and_a_new_incarnation_is_taken() -> None:
    driver = router(1)
    driver.pull(V3)
    with pytest.raises(WeightsError, match="pull refused: v2 is older than v3"):
        driver.fleet.ask(V2)
    driver.pull(PolicyVersion(1, 0))
    one_pull(driver, "g0")
    assert driver.fleet["g0"].version == PolicyVersion(1, 0)


def test_a_failed_pull_is_tried_again_and_then_leaves_it_stale_while_others_serve() -> None:
    driver = router(2, retries=1)
    driver.pull(V1)
    one_pull(driver, "g0", "failed")
    assert states(driver) == ["syncing", "syncing"]
    one_pull(driver, "g0", "failed")
    one_pull(driver, "g1")
    assert states(driver) == ["stale", "serving"] and driver.fleet["g0"].reason == "bad bytes in v1"
    assert not driver.syncs and driver.fleet.settled(V1)
    driver.pull(V2)
    driver.become_quiet()
    assert states(driver) == ["serving", "serving"]


def test_a_generator_that_failed_for_good_does_not_hold_up_the_others() -> None:
    driver = router(2, max_syncing=1, retries=0)
    driver.pull(V1)
    one_pull(driver, "g0", "failed")
    assert states(driver) == ["stale", "syncing"]


def test_a_generator_that_failed_for_good_gets_its_attempts_anew_when_the_version_is_asked_for_again() -> None:
    driver = router(1, retries=0)
    driver.pull(V1)
    one_pull(driver, "g0", "failed")
    assert not driver.anyone_serves and not driver.syncs
    driver.pull(V1)
    one_pull(driver, "g0")
    assert states(driver) == ["serving"]


def test_a_failed_pull_of_an_overtaken_version_costs_no_attempt_at_the_newer_one() -> None:
    driver = router(1, retries=0)
    driver.pull(V1)
    driver.begin_pull("g0")
    driver.pull(V2)
    driver.end_pull("g0", "failed")
    assert not driver.pulls[-1].done
    one_pull(driver, "g0")
    assert driver.fleet["g0"].version == V2 and states(driver) == ["serving"]


def test_a_failed_hot_swap_serves_nothing_more() -> None:
    driver = router(2, mode="hot_swap", retries=0)
    driver.pull(V1)
    one_pull(driver, "g0", "failed")
    assert states(driver) == ["stale", "serving"]


def test_stragglers_of_a_drain_go_on_elsewhere() -> None:
    driver = router(2, max_syncing=1)
    driver.arrive([request("r0"), request("r1")])
    driver.pull(V1)
    assert not driver.can_begin("g0")
    driver.drain_deadline("g0")
    assert driver.can_begin("g0")
    assert [driver.dispatcher.in_flight(name) for name in ("g0", "g1")] == [0, 2]


def test_a_sleeping_generator_takes_no_requests_and_no_weights_until_it_is_woken() -> None:
    driver = router(2)
    driver.sleep("g0")
    driver.arrive([request("r0"), request("r1")])
    assert driver.dispatcher.in_flight("g0") == 0
    driver.pull(V1)
    driver.become_quiet()
    assert states(driver) == ["asleep", "serving"] and driver.fleet.settled(V1)
    driver.wake("g0")
    assert driver.fleet["g0"].must_wake and not driver.pulls[-1].done
    one_pull(driver, "g0")
    assert driver.fleet["g0"].version == V1 and not driver.fleet["g0"].must_wake


def test_a_wake_up_is_not_over_before_its_pull_though_the_version_was_served_before() -> None:
    driver = router(2)
    driver.sleep("g0")
    driver.wake("g0")
    assert not driver.fleet.settled(V0)
    one_pull(driver, "g0")
    assert driver.pulls[-1].done and driver.fleet["g0"].state is GeneratorState.SERVING


def test_a_failed_wake_up_is_retried_as_a_wake_up() -> None:
    driver = router(2, retries=1)
    driver.sleep("g0")
    driver.wake("g0")
    one_pull(driver, "g0", "failed")
    assert driver.fleet["g0"].must_wake
    one_pull(driver, "g0")
    assert states(driver) == ["serving", "serving"]


def test_a_generator_put_to_sleep_after_a_failed_wake_up_sleeps_until_it_is_woken_again() -> None:
    driver = router(2, retries=0)
    driver.sleep("g0")
    driver.wake("g0")
    one_pull(driver, "g0", "failed")
    driver.sleep("g0")
    driver.pull(V1)
    assert "g0" not in driver.syncs
    driver.become_quiet()
    assert states(driver) == ["asleep", "serving"]


def test_who_is_in_a_sync_cannot_be_put_to_sleep_and_who_is_awake_cannot_be_woken() -> None:
    driver = router(2, mode="hot_swap")
    driver.pull(V1)
    with pytest.raises(GeneratorNotServing, match="g0 cannot be put to sleep"):
        driver.fleet.sleep("g0")
    with pytest.raises(GeneratorNotServing, match="g0 cannot be woken: it is serving"):
        driver.fleet.wake("g0")


def test_nobody_is_woken_before_there_are_weights() -> None:
    driver = router(1, ready=False)
    driver.sleep("g0")
    with pytest.raises(GeneratorNotServing, match="there are no weights to pull yet"):
        driver.fleet.wake("g0")


def test_a_pinned_generator_stays_at_its_version_while_the_others_go_on() -> None:
    driver = router(3)
    driver.arrive([request(f"r{index}") for index in range(3)])
    name = driver.pin(V0)
    assert name == "g0" and states(driver) == ["pinned", "serving", "serving"]
    driver.arrive([request("all"), request("judged", pinned_to="g0")])
    assert [driver.live[each][0].generator for each in ("all", "judged")] == ["g1", "g0"]
    driver.pull(V1)
    for other in ("g1", "g2"):
        driver.drain_deadline(other)
        one_pull(driver, other)
    assert driver.fleet.settled(V1) and driver.fleet["g0"].version == V0
    driver.unpin("g0")
    assert states(driver) == ["syncing", "serving", "serving"] and not driver.can_begin("g0"), "it finishes first"
    driver.deliver(["r0", "judged"])
    one_pull(driver, "g0")
    assert driver.fleet["g0"].version == V1 and states(driver)[0] == "serving"


def test_the_last_one_that_serves_is_not_pinned_and_no_other_version_is() -> None:
    driver = router(2)
    with pytest.raises(GeneratorNotServing, match="no generator can be pinned at v1: g0 is serving at v0, g1 is"):
        driver.fleet.pin(V1, driver.dispatcher.load)
    driver.sleep("g1")
    with pytest.raises(GeneratorNotServing, match="g0 cannot be pinned at v0: nobody else would serve"):
        driver.fleet.pin(V0, driver.dispatcher.load)


def test_requests_for_a_pin_that_ended_fail_instead_of_waiting() -> None:
    driver = router(2)
    assert driver.pin(V0) == "g0"
    driver.arrive([request("r0", pinned_to="g0")])
    assert "pinned at v0, asked for is v1 or newer" in str(
        driver.dispatcher.refusal(request("r1", pinned_to="g0", at_least=V1))
    )
    driver.unpin("g0")
    assert "g0 is not pinned" in str(driver.dispatcher.refusal(request("r1", pinned_to="g0")))
    driver.drain_deadline("g0")
    assert driver.callers["r0"].place == LEFT and driver.dispatcher.load("g0") == 0


def test_a_generator_in_a_hot_swap_says_so_when_it_is_put_to_sleep() -> None:
    driver = router(1, mode="hot_swap")
    driver.pull(V1)
    with pytest.raises(GeneratorNotServing, match="g0 cannot be put to sleep: it is in a change of weights"):
        driver.fleet.sleep("g0")
