"""The number by which a generator that hangs is told from one that works."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from loop_harness import BOUND, VOCAB, Collector, Turnstile, make_publication, make_ranks, make_request

from titan_rl.generation.engine import Engine, SimulatedEngine
from titan_rl.weights.manifest import Publication


def test_the_pulse_stands_still_in_a_step_and_grows_with_decisions_and_in_what_has_a_bound_of_its_own() -> None:
    turnstile, loading, may_load = Turnstile(), threading.Semaphore(0), threading.Event()

    def load(publication: Publication) -> Iterable[tuple[str, Any]]:
        loading.release()
        assert may_load.wait(BOUND)
        return ()

    def engine() -> Engine:
        return SimulatedEngine(vocab_size=VOCAB, seconds_per_step=1.0, sleep=turnstile)

    loops = make_ranks([Collector(), Collector()], [engine, engine], load=load, heartbeat_seconds=0.001)
    leader, follower = loops
    pull = leader.pull(make_publication(0))
    for _ in loops:
        assert loading.acquire(timeout=BOUND)
    for loop in loops:
        assert loop.pulse() < loop.pulse(), "it pulls"
    may_load.set()
    pull.result(timeout=BOUND)
    leader.submit([make_request("a", new=1)])
    for _ in loops:
        turnstile.wait_for_step()
    before = [loop.pulse() for loop in loops]
    assert [loop.pulse() for loop in loops] == before, "both are in the step"
    for _ in loops:
        turnstile.open()
    for loop, pulse in zip(loops, before, strict=True):
        while loop.pulse() == pulse:
            pass  # until a heartbeat
    leader.close().result(timeout=BOUND)
    follower.close().result(timeout=BOUND)
