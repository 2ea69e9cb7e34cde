"""Requests that fail alone: their time is over, generators die under them, or the strategy raises for them."""

from __future__ import annotations

import pytest
from routing_examples import V0, completion, request

from titan_rl.errors import ConfigError, RequestError, RequestLost, RequestTimeout
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Dispatcher
from titan_rl.routing.strategies import RoundRobin
from titan_rl.types import FinishReason, GenerationRequest


def dispatcher(
    count: int = 1, *, strategy: RoundRobin | None = None, seconds: float = 0.0, retries: int = 1
) -> Dispatcher:
    strategy = strategy or RoundRobin()
    for index in range(count):
        strategy.serves(f"g{index}", V0)
    return Dispatcher(strategy, seconds=seconds, retries=retries)


def test_only_the_time_with_generators_counts_over_all_attempts() -> None:
    router = dispatcher(seconds=10.0)
    (first,) = router.submit([request("r")], 0.0)
    assert router.wake_at == 10.0 and router.overdue(9.0) == []
    router.completed("r", completion(first.request, 1), 9.0)
    assert router.overdue(100.0) == [], "it waits"
    (second,) = router.reconsider(100.0)
    assert router.wake_at == 101.0
    assert router.overdue(101.0) == [second]
    ((request_id, error),) = router.failures()
    assert request_id == "r" and isinstance(error, RequestTimeout) and "router.request_seconds" in str(error)
    assert router.overdue(102.0) == [] and router.failures() == [] and router.in_flight("g0") == 1
    router.completed(second.request.request_id, completion(second.request, 1), 103.0)
    assert router.in_flight("g0") == router.waiting == 0 and router.wake_at is None


def test_a_request_that_finished_in_time_is_not_overdue() -> None:
    router = dispatcher(seconds=10.0)
    (attempt,) = router.submit([request("r")], 0.0)
    router.completed("r", completion(attempt.request, 1, FinishReason.STOP), 5.0)
    assert router.overdue(20.0) == [] and router.failures() == []


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_so_many_generators_die_under_one_request_and_no_more(retries: int) -> None:
    router = dispatcher(5, retries=retries)
    (attempt,) = router.submit([request("r")], 0.0)
    for death in range(retries + 1):
        assert router.lost(attempt.request.request_id, 0.0) is None, "an interruption does not count"
        (attempt,) = router.reconsider(0.0)
        assert router.lost(attempt.request.request_id, 0.0, died=f"death {death}") is None
        if death < retries:
            (attempt,) = router.reconsider(0.0)
    ((request_id, error),) = router.failures()
    assert request_id == "r" and isinstance(error, RequestLost) and str(error).count("death") == retries + 1
    assert router.reconsider(0.0) == [] and router.waiting == router.live == 0


class Choosy(RoundRobin):
    def choose(self, request: GenerationRequest, *, now: float, waiting_since: float) -> str | None:
        if request.session_id == "odd":
            raise KeyError("odd")
        return super().choose(request, now=now, waiting_since=waiting_since)  # type: ignore[return-value]


def test_a_request_for_which_the_strategy_raises_fails_alone() -> None:
    router = dispatcher(strategy=Choosy())
    assignments = router.submit([request("r0"), request("r1", session="odd"), request("r2")], 0.0)
    assert [each.request.request_id for each in assignments] == ["r0", "r2"]
    ((request_id, error),) = router.failures()
    assert request_id == "r1" and isinstance(error, RequestError) and "strategy raised KeyError: 'odd'" in str(error)
    assert router.waiting == 0


def test_bounds_below_zero_are_refused() -> None:
    for name in ("request_seconds", "request_retries"):
        with pytest.raises(ConfigError, match=f"router.{name} must be"):
            RouterConfig(**{name: -1})
