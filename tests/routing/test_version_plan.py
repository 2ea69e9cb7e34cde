"""Which generator takes which weights when, and when requests may pass: one example for every rule.

Random schedules of the same parts are in `test_router_schedules`.
"""

from __future__ import annotations

from typing import Any

import pytest
from router_books import LIVE, WAITING
from router_driver import RouterDriver
from routing_examples import V0, V1, V2, request

from titan_rl.routing.health import Phase
from titan_rl.routing.strategies import LeastLoaded
from titan_rl.types import PolicyVersion


def router(generators: int, *, ready: bool = True, **options: Any) -> RouterDriver:
    driver = RouterDriver(LeastLoaded(), generators=generators, **options)
    if ready:
        driver.pull(V0)
        driver.become_quiet()
    return driver


def states(driver: RouterDriver) -> list[str]:
    return [health.phase.value for health in driver.fleet]


def versions(driver: RouterDriver) -> list[PolicyVersion | None]:
    return [health.version for health in driver.fleet]


def one_pull(driver: RouterDriver, name: str, outcome: str = "verified") -> None:
    driver.begin_pull(name)
    driver.end_pull(name, outcome)
    driver.check()


def test_requests_wait_until_somebody_serves_their_version_and_then_go_through() -> None:
    driver = router(2, ready=False)
    driver.arrive([request("r0"), request("r1")])
    assert {caller.place for caller in driver.callers.values()} == {WAITING}
    driver.pull(V0)
    one_pull(driver, "g1")
    assert {caller.place for caller in driver.callers.values()} == {LIVE}
    driver.become_quiet()
    driver.pull(V1)
    driver.arrive([request("new", at_least=V1)])
    assert driver.callers["new"].place == WAITING
    one_pull(driver, "g0")
    assert driver.callers["new"].place == LIVE


def test_one_serves_while_the_other_syncs() -> None:
    driver = router(2, max_syncing=1)
    driver.pull(V1)
    assert states(driver) == ["draining", "serving"]
    one_pull(driver, "g0")
    assert states(driver) == ["serving", "draining"] and not driver.pulls[-1].done
    one_pull(driver, "g1")
    assert versions(driver) == [V1, V1] and driver.pulls[-1].done


def test_new_generators_start_at_once_whatever_the_limit() -> None:
    driver = router(3, ready=False, max_syncing=1)
    driver.pull(V0)
    assert sorted(driver.syncs) == ["g0", "g1", "g2"]


def test_an_idle_generator_takes_its_weights_before_a_busy_one() -> None:
    driver = router(3, max_syncing=1)
    driver.arrive([request("r0"), request("r1")])
    driver.deliver(["r1"])
    driver.pull(V1)
    assert states(driver) == ["serving", "draining", "serving"]
    one_pull(driver, "g1")
    one_pull(driver, "g2")
    assert states(driver) == ["draining", "serving", "serving"] and driver.live_on("g0") == ["r0"]


def test_a_hot_swap_drains_a_generator_that_has_requests_for_an_exact_version() -> None:
    driver = router(2, weight_sync="hot_swap")
    driver.arrive([request("judged", exact=V0), request("r")])
    driver.plan.want([V1])
    driver.advance()
    assert [driver.fleet[name].phase for name in driver.names] == [Phase.DRAINING, Phase.SWAPPING]
    driver.arrive([request("late", exact=V0)])
    assert driver.callers["late"].place == WAITING, "the weights may change under it"
    driver.deliver(["judged"])
    one_pull(driver, "g0")


def test_a_generator_that_is_overtaken_in_its_pull_serves_who_waits_and_then_pulls_again() -> None:
    driver = router(1)
    driver.pull(V1)
    driver.begin_pull("g0")
    driver.arrive([request("old", at_least=V1), request("new", at_least=V2)])
    driver.pull(V2)
    driver.end_pull("g0", "verified")
    assert [driver.callers[each].place for each in ("old", "new")] == [LIVE, WAITING]
    assert states(driver) == ["draining"] and not driver.can_begin("g0"), "what it has just taken on comes first"
    assert not any(pull.done for pull in driver.pulls[-2:]), "the newest counts for both"
    driver.deliver(["old"])
    one_pull(driver, "g0")
    assert driver.callers["new"].place == LIVE and all(pull.done for pull in driver.pulls)


def test_a_version_is_lost_when_every_generator_failed_to_pull_it_and_that_of_an_overtaken_one_does_not_count() -> None:
    driver = router(1, pull_retries=0)
    driver.pull(V1)
    driver.begin_pull("g0")
    driver.pull(V2)
    driver.end_pull("g0", "failed")
    assert not driver.plan.is_lost(V2) and not driver.pulls[-1].done
    one_pull(driver, "g0", "failed")
    assert driver.plan.is_lost(V2) and driver.pulls[-1].done
    assert driver.fleet.describe() == "g0: bad bytes in v2"


def test_a_version_that_was_served_is_unavailable_once_nobody_can_load_it_again() -> None:
    """While others may try, it is not; and one that was never served is the business of the pull that waits for it."""
    driver = router(2, pull_retries=0)
    driver.pull(V1, V0)
    one_pull(driver, "g0")
    driver.arrive([request("judged", exact=V0)])
    driver.die("g1")
    driver.join("g1")
    one_pull(driver, "g1", "failed")
    assert driver.syncs == {"g0": None} and driver.plan.unavailable is None, "g0 is idle, and tries too"
    one_pull(driver, "g0", "failed")
    assert driver.plan.unavailable == V0 and not driver.syncs
    driver.pull(V2)
    for name in ("g0", "g1"):
        one_pull(driver, name, "failed")
    assert driver.plan.is_lost(V2) and driver.plan.unavailable != V2


def test_a_version_is_not_unavailable_because_all_that_served_it_sleep_or_are_given_up() -> None:
    driver = router(2)
    driver.sleep("g0")
    driver.leave_out("g1")
    assert driver.plan.is_lost(V0) and driver.plan.unavailable is None


# --- several wanted versions -----------------------------------------------------------------------------------------


def test_of_an_older_wanted_version_one_generator_stays_and_all_others_take_the_newest() -> None:
    driver = router(3)
    driver.pull(V1, V0)
    driver.become_quiet()
    assert sorted(versions(driver)) == [V0, V1, V1] and driver.pulls[-1].done
    driver.arrive([request("judged", exact=V0), request("new", at_least=V1)])
    assert driver.fleet[driver.live["judged"][0].generator].version == V0
    driver.become_quiet()
    driver.pull(V1)
    driver.become_quiet()
    assert versions(driver) == [V1] * 3


def test_each_wanted_version_has_one_generator_before_the_newest_waits_for_a_place() -> None:
    driver = router(2)
    driver.pull(V1, V0)
    driver.become_quiet()
    driver.pull(V0, V1, V2)
    assert not driver.syncs, "each has one generator, and v2 must wait"
    assert not driver.pulls[-1].done
    driver.pull(V1, V2)
    (name,) = driver.syncs
    assert driver.fleet[name].version == V0
    one_pull(driver, name)
    assert sorted(versions(driver)) == [V1, V2] and driver.pulls[-1].done


@pytest.mark.parametrize("asked", [{"exact": V0}, {"at_least": V2}])
def test_an_idle_generator_goes_where_requests_wait_if_no_other_one_will_come(asked: dict[str, PolicyVersion]) -> None:
    driver = router(2)
    driver.pull(V1)
    driver.become_quiet()
    driver.arrive([request("busy", exact=V1)])
    driver.die("g1")
    driver.pull(V0, V1, V2)
    driver.arrive([request("waiting", **asked)])
    driver.deliver(["busy"])
    assert not driver.syncs, "a replacement will serve it"
    driver.arrive([request("more", exact=V1)])
    driver.leave_out("g1")
    assert not driver.syncs, "it is not idle"
    driver.deliver(["more"])
    one_pull(driver, "g0")
    assert driver.callers["waiting"].place == LIVE
