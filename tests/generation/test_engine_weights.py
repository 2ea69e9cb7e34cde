"""The engine thread takes, refuses and gives up weights, whatever it is doing. About 1 s."""

from __future__ import annotations

import threading

import pytest
from loop_harness import BOUND, Collector, Turnstile, make_loop, make_publication, make_request

from titan_rl.errors import GeneratorNotServing, WeightsError
from titan_rl.generation.engine import Engine, SimulatedEngine
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.types import FinishReason, PolicyVersion
from titan_rl.weights.manifest import Publication


def test_a_pull_in_flight_changes_the_version_of_later_tokens_only(
    loop: EngineLoop, collector: Collector, turnstile: Turnstile
) -> None:
    loop.submit([make_request("a", new=5)])
    turnstile.wait_for_step()
    turnstile.let_through(1)
    turnstile.wait_for_step()
    older, newer = loop.pull(make_publication(1)), loop.pull(make_publication(2))
    turnstile.let_through(1)
    reports = [older.result(timeout=BOUND), newer.result(timeout=BOUND)]
    assert [report.version.step for report in reports] == [2, 2]
    assert reports[0].requests_in_flight == 1
    turnstile.open()
    (completion,) = collector.wait_for("a")
    assert completion.versions.tolist() == [0, 0, 2, 2, 2]


def test_a_caller_cannot_cancel_a_pull_under_the_loop(loop: EngineLoop, turnstile: Turnstile) -> None:
    loop.submit([make_request("a", new=2)])
    turnstile.wait_for_step()
    future = loop.pull(make_publication(1))
    assert not future.cancel()
    turnstile.open()
    assert future.result(timeout=BOUND).version == PolicyVersion(0, 1)


def test_a_failed_verification_serves_nothing_until_a_pull_succeeds(collector: Collector, turnstile: Turnstile) -> None:
    damaged = True

    def verify(publication: Publication, engine: Engine) -> int:
        if damaged and publication.version.step == 1:
            raise WeightsError("lm_head.weight has another fingerprint")
        return 7

    loop = make_loop(collector, engine=lambda: SimulatedEngine(seconds_per_step=1.0, sleep=turnstile), verify=verify)
    loop.start().result(timeout=BOUND)
    loop.pull(make_publication(0)).result(timeout=BOUND)
    loop.submit([make_request("flying", new=50)])
    turnstile.wait_for_step()
    pull = loop.pull(make_publication(1))
    loop.submit([make_request("waiting")])
    turnstile.let_through()
    with pytest.raises(WeightsError, match="policy v1 cannot be served: rank 0: WeightsError: lm_head.weight"):
        pull.result(timeout=BOUND)
    flying, waiting = collector.wait_for("flying", "waiting")
    assert (flying.finish_reason, len(flying.token_ids)) == (FinishReason.ABORT, 1)
    assert (waiting.finish_reason, len(waiting.token_ids)) == (FinishReason.ABORT, 0)
    with pytest.raises(GeneratorNotServing, match="lm_head.weight has another fingerprint"):
        loop.submit([make_request("refused")])
    damaged = False
    turnstile.open()
    loop.pull(make_publication(1)).result(timeout=BOUND)
    loop.submit([make_request("served", new=1)])
    assert collector.wait_for("served")[0].versions.tolist() == [1]
    loop.close().result(timeout=BOUND)


def test_weights_that_cannot_be_read_leave_nothing_served(collector: Collector) -> None:
    def load(publication: Publication) -> list[tuple[str, object]]:
        raise FileNotFoundError(publication.location)

    loop = make_loop(collector, load=load)
    loop.start().result(timeout=BOUND)
    with pytest.raises(WeightsError, match="FileNotFoundError: /gone") as caught:
        loop.pull(make_publication(0, location="/gone")).result(timeout=BOUND)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(GeneratorNotServing, match="stale: policy v0 cannot be served"):
        loop.submit([make_request("refused")])
    loop.close().result(timeout=BOUND)


def test_a_sleeping_loop_serves_again_only_after_a_wake_up_with_weights(
    loop: EngineLoop, collector: Collector, turnstile: Turnstile
) -> None:
    loop.submit([make_request("flying", new=50)])
    turnstile.wait_for_step()
    asleep = loop.sleep()
    turnstile.let_through()
    assert asleep.result(timeout=BOUND) == 0, "this engine frees nothing, and says so"
    assert collector.wait_for("flying")[0].finish_reason is FinishReason.ABORT
    with pytest.raises(GeneratorNotServing):
        loop.submit([make_request("refused")])
    with pytest.raises(GeneratorNotServing):
        loop.pull(make_publication(1))
    assert loop.wake_up(make_publication(1)).result(timeout=BOUND).version == PolicyVersion(0, 1)
    turnstile.open()
    loop.submit([make_request("served", new=1)])
    assert collector.wait_for("served")[0].versions.tolist() == [1]


def test_a_wake_up_that_is_asked_for_while_the_engine_falls_asleep_is_not_lost(collector: Collector) -> None:
    falling_asleep, go_on = threading.Event(), threading.Event()

    class Slow(SimulatedEngine):
        def sleep(self) -> int:
            falling_asleep.set()
            assert go_on.wait(BOUND)
            return 0

    loop = make_loop(collector, engine=Slow)
    loop.start().result(timeout=BOUND)
    loop.pull(make_publication(0)).result(timeout=BOUND)
    asleep = loop.sleep()
    assert falling_asleep.wait(BOUND)
    awake = loop.wake_up(make_publication(1))
    go_on.set()
    asleep.result(timeout=BOUND)
    assert awake.result(timeout=BOUND).version == PolicyVersion(0, 1)
    loop.close().result(timeout=BOUND)


def test_an_older_pull_that_is_asked_for_during_a_newer_one_is_refused(collector: Collector) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(publication: Publication) -> list[tuple[str, object]]:
        loading.set()
        assert go_on.wait(BOUND)
        return []

    loop = make_loop(collector, load=load)
    loop.start().result(timeout=BOUND)
    newer = loop.pull(make_publication(2))
    assert loading.wait(BOUND)
    with pytest.raises(WeightsError, match="v1 is older than v2, which was asked for before"):
        loop.pull(make_publication(1))
    again = loop.pull(make_publication(2))
    go_on.set()
    assert [future.result(timeout=BOUND).version.step for future in (newer, again)] == [2, 2]
    loop.close().result(timeout=BOUND)
