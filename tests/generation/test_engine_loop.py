"""The engine thread, and the pieces of requests that stream. A test lets the steps of simulated engines through one by
one. About 3 s."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import pytest
from loop_harness import (
    BOUND,
    VOCAB,
    Collector,
    Turnstile,
    make_loop,
    make_publication,
    make_ranks,
    make_request,
    simulated_tokens,
    streaming,
)
from support.timed_engine import TimedEngine
from torch import Tensor

from titan_rl.errors import GeneratorFailed, GeneratorNotServing, RequestError
from titan_rl.generation.decisions import LoopAction, LoopDecision
from titan_rl.generation.engine import Engine, StepOutput
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.simulated_engine import SimulatedEngine
from titan_rl.types import Completion, FinishReason, Piece, PolicyVersion
from titan_rl.weights.ranks import Ranks


def test_requests_before_the_first_pull_wait_and_are_then_served(collector: Collector) -> None:
    loop = make_loop(collector, engine=lambda: SimulatedEngine(vocab_size=VOCAB))
    loop.start().result(timeout=BOUND)
    assert loop.submit([make_request("a", new=3, seed=5)]) == [None]
    assert not collector.completions
    assert loop.pull(make_publication(4)).result(timeout=BOUND) == PolicyVersion(0, 4)
    (completion,) = collector.wait_for("a")
    assert completion.token_ids.tolist() == simulated_tokens(5, 3, VOCAB)
    assert completion.versions.tolist() == [4, 4, 4]
    assert completion.finish_reason is FinishReason.LENGTH
    assert {"generation/seconds_queued", "generation/seconds_in_engine"} <= completion.metrics.keys()
    loop.close().result(timeout=BOUND)


def test_invalid_requests_are_refused_one_by_one_and_disturb_nobody(
    loop: EngineLoop, collector: Collector, turnstile: Turnstile
) -> None:
    turnstile.open()
    good, again, empty, outside, hot = loop.submit(
        [
            make_request("good"),
            make_request("good"),
            make_request("empty", prompt=()),
            make_request("outside", prompt=(1, VOCAB)),
            make_request("hot", temperature="hot"),
        ]
    )
    assert good is None
    assert isinstance(again, RequestError) and "already in use" in str(again)
    assert isinstance(empty, RequestError) and "'empty': the prompt is empty" in str(empty)
    assert isinstance(outside, RequestError) and "token 13 is outside" in str(outside)
    assert isinstance(hot, RequestError) and "'hot': TypeError" in str(hot)
    collector.wait_for("good")
    assert loop.submit([make_request("good2")]) == [None]
    collector.wait_for("good2")


def test_an_aborted_request_comes_back_with_the_tokens_it_has(
    loop: EngineLoop, collector: Collector, turnstile: Turnstile
) -> None:
    loop.submit([make_request("long", new=100, seed=3), make_request("other", new=4)])
    turnstile.wait_for_step()
    turnstile.let_through(2)
    turnstile.wait_for_step()
    loop.submit([make_request("unseen")])
    loop.abort(["long", "unseen", "unknown"])
    (unseen,) = collector.wait_for("unseen")
    assert (len(unseen.token_ids), unseen.finish_reason) == (0, FinishReason.ABORT)
    turnstile.let_through(2)
    long, other = collector.wait_for("long", "other")
    assert long.finish_reason is FinishReason.ABORT
    assert long.token_ids.tolist() == simulated_tokens(3, 3, VOCAB)
    assert len(long.logprobs) == len(long.versions) == 3
    assert other.finish_reason is FinishReason.LENGTH


def test_close_hands_everything_back_and_later_calls_fail_at_once(
    loop: EngineLoop, collector: Collector, turnstile: Turnstile
) -> None:
    loop.submit([make_request("flying", new=50)])
    turnstile.wait_for_step()
    loop.submit([make_request("waiting")])
    pull = loop.pull(make_publication(1))
    closed = loop.close()
    turnstile.let_through()
    closed.result(timeout=BOUND)
    assert all(completion.finish_reason is FinishReason.ABORT for completion in collector.wait_for("flying", "waiting"))
    with pytest.raises(GeneratorFailed, match="closed"):
        pull.result(timeout=BOUND)
    for call in (
        lambda: loop.submit([make_request("a")]),
        lambda: loop.pull(make_publication(2)),
        lambda: loop.abort(["flying"]),
        lambda: loop.wake_up(make_publication(2)),
        loop.sleep,
    ):
        with pytest.raises(GeneratorFailed, match="closed"):
            call()
    assert loop.close().result(timeout=BOUND) is None


def test_a_pull_in_flight_changes_the_version_of_later_tokens_only(
    loop: EngineLoop, collector: Collector, turnstile: Turnstile
) -> None:
    loop.submit([make_request("a", new=5)])
    turnstile.wait_for_step()
    turnstile.let_through(1)
    turnstile.wait_for_step()
    older, newer = loop.pull(make_publication(1)), loop.pull(make_publication(2))
    assert not newer.cancel(), "the engine thread will resolve it in any case"
    turnstile.let_through(1)
    assert [older.result(timeout=BOUND).step, newer.result(timeout=BOUND).step] == [2, 2]
    turnstile.open()
    (completion,) = collector.wait_for("a")
    assert completion.versions.tolist() == [0, 0, 2, 2, 2]


def test_a_wake_up_with_weights_serves_again_also_if_it_comes_while_the_engine_falls_asleep(
    collector: Collector, turnstile: Turnstile
) -> None:
    falling_asleep, go_on = threading.Event(), threading.Event()

    class Slow(TimedEngine):
        def sleep(self) -> int:
            falling_asleep.set()
            assert go_on.wait(BOUND)
            return 0

    loop = make_loop(collector, engine=lambda: Slow(seconds_per_step=1.0, sleep=turnstile))
    loop.start().result(timeout=BOUND)
    loop.pull(make_publication(0)).result(timeout=BOUND)
    loop.submit([make_request("flying", new=50)])
    turnstile.wait_for_step()
    asleep = loop.sleep()
    turnstile.open()
    assert falling_asleep.wait(BOUND)
    for refused in (lambda: loop.submit([make_request("refused")]), lambda: loop.pull(make_publication(1))):
        with pytest.raises(GeneratorNotServing):
            refused()
    awake = loop.wake_up(make_publication(1))
    go_on.set()
    assert asleep.result(timeout=BOUND) == 0, "this engine frees nothing, and says so"
    assert collector.wait_for("flying")[0].finish_reason is FinishReason.ABORT
    assert awake.result(timeout=BOUND) == PolicyVersion(0, 1)
    loop.submit([make_request("served", new=1)])
    assert collector.wait_for("served")[0].versions.tolist() == [1]
    loop.close().result(timeout=BOUND)


class _Crashing(TimedEngine):
    def step(self) -> StepOutput:
        super().step()
        raise ArithmeticError("head_dim 16 has no kernel")


def test_a_crash_fails_everything_outstanding_and_everything_later(collector: Collector, turnstile: Turnstile) -> None:
    loop = make_loop(collector, engine=lambda: _Crashing(seconds_per_step=1.0, sleep=turnstile))
    loop.start().result(timeout=BOUND)
    loop.pull(make_publication(0)).result(timeout=BOUND)
    loop.submit([make_request("doomed")])
    turnstile.wait_for_step()
    pull, sleep = loop.pull(make_publication(1)), loop.sleep()
    turnstile.open()
    assert isinstance(collector.fatal(), ArithmeticError)
    for future in (pull, sleep, loop.close()):
        with pytest.raises(GeneratorFailed, match="rank 0 died: ArithmeticError: head_dim 16 has no kernel") as caught:
            future.result(timeout=BOUND)
        assert isinstance(caught.value.__cause__, ArithmeticError)
    for call in (
        lambda: loop.submit([make_request("late")]),
        lambda: loop.pull(make_publication(2)),
        lambda: loop.abort(["doomed"]),
        lambda: loop.wake_up(make_publication(2)),
        loop.sleep,
    ):
        with pytest.raises(GeneratorFailed, match="head_dim 16"):
            call()
    assert collector.errors.empty(), "told once"


def test_a_crash_during_a_pull_fails_that_pull(collector: Collector) -> None:
    class Broken(Ranks):
        def maximum(self, values: Tensor) -> None:
            raise ConnectionError("peer is gone")

    loop = make_loop(collector, ranks=Broken(None))
    loop.start().result(timeout=BOUND)
    with pytest.raises(GeneratorFailed, match="ConnectionError: peer is gone"):
        loop.pull(make_publication(0)).result(timeout=BOUND)


def test_an_engine_that_cannot_be_built_is_told_to_whoever_started_it(collector: Collector) -> None:
    def build() -> Engine:
        raise OSError("no such model")

    loop = make_loop(collector, engine=build)
    with pytest.raises(OSError, match="no such model"):
        loop.start().result(timeout=BOUND)
    with pytest.raises(GeneratorFailed, match="no such model"):
        loop.submit([make_request("a")])
    assert collector.errors.empty()


def test_nothing_is_taken_before_the_engine_is_built(collector: Collector) -> None:
    release = threading.Event()

    def build() -> Engine:
        assert release.wait(BOUND)
        return SimulatedEngine()

    loop = make_loop(collector, engine=build)
    ready = loop.start()
    with pytest.raises(GeneratorNotServing, match="not built yet"):
        loop.submit([make_request("a")])
    closed = loop.close()
    release.set()
    ready.result(timeout=BOUND)
    closed.result(timeout=BOUND)


def test_the_engine_is_used_by_one_thread_only(collector: Collector) -> None:
    threads: set[int] = set()

    class Watched(SimulatedEngine):
        def __getattribute__(self, name: str) -> object:
            if name in ("add", "abort", "step", "load_weights", "drop_cache", "sleep", "wake", "close"):
                threads.add(threading.get_ident())
            return super().__getattribute__(name)

    loop = make_loop(collector, engine=Watched)
    loop.start().result(timeout=BOUND)
    loop.pull(make_publication(0)).result(timeout=BOUND)
    loop.submit([make_request("a"), make_request("b", new=4000)])
    loop.abort(["b"])
    collector.wait_for("a", "b")
    loop.sleep().result(timeout=BOUND)
    loop.wake_up(make_publication(1)).result(timeout=BOUND)
    loop.close().result(timeout=BOUND)
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_follower_takes_no_calls(collector: Collector) -> None:
    class Silent(Ranks):
        def broadcast(self, value: Any) -> Any:
            assert done.wait(BOUND)
            return LoopDecision(sequence=0, action=LoopAction.CLOSE, digest=collector.digest)

    done = threading.Event()
    loop = make_loop(collector, rank=1, ranks=Silent(None))
    loop.start().result(timeout=BOUND)
    with pytest.raises(GeneratorFailed, match="only rank 0"):
        loop.submit([make_request("a")])
    with pytest.raises(GeneratorFailed, match="only rank 0"):
        loop.pull(make_publication(0))
    closed = loop.close()
    done.set()
    closed.result(timeout=BOUND)
    assert not collector.completions


def are_the_beginning(pieces: list[Piece], completion: Completion, *, start: int = 0) -> int:
    """Asserts it; returns the position after the last piece, in the completion."""
    position = 0
    for piece in pieces:
        assert piece.offset == start + position
        span = slice(position, position + len(piece.token_ids))
        for name in ("token_ids", "logprobs", "versions"):
            mine, its = getattr(piece, name), getattr(completion, name)
            assert mine.tolist() == its[span].tolist() and mine.dtype == its.dtype
        position = span.stop
    return position


def test_tokens_come_while_the_engine_samples_the_next(
    loop: EngineLoop, collector: Collector, turnstile: Turnstile
) -> None:
    loop.submit([streaming("s", new=4, seed=3), make_request("whole", new=4)])
    turnstile.wait_for_step()
    for length in range(1, 4):
        turnstile.let_through()
        turnstile.wait_for_step()
        pieces = collector.wait_for_pieces("s", length)
        assert [piece.token_ids.tolist() for piece in pieces] == [[each] for each in simulated_tokens(3, length, VOCAB)]
    assert not collector.completions
    turnstile.let_through()
    completion, _ = collector.wait_for("s", "whole")
    assert are_the_beginning(collector.pieces["s"], completion) == 3, "the last token comes with the completion"
    assert "whole" not in collector.pieces, "who does not stream gets no pieces"


def test_a_resumed_request_counts_on_from_what_it_has(collector: Collector) -> None:
    loop = make_loop(collector, engine=lambda: SimulatedEngine(vocab_size=VOCAB, clock=count().__next__))
    loop.start().result(timeout=BOUND)
    loop.pull(make_publication(0)).result(timeout=BOUND)
    loop.submit([streaming("s", start=17)])
    (completion,) = collector.wait_for("s")
    assert collector.pieces["s"][0].offset == 17
    assert are_the_beginning(collector.pieces["s"], completion, start=17) == 7
    loop.close().result(timeout=BOUND)


def test_positions_go_on_through_a_swap_and_an_abort(
    loop: EngineLoop, collector: Collector, turnstile: Turnstile
) -> None:
    loop.submit([streaming("s", new=100)])
    turnstile.wait_for_step()
    turnstile.let_through(2)
    turnstile.wait_for_step()
    pull = loop.pull(make_publication(1))
    turnstile.let_through(2)
    turnstile.wait_for_step()
    assert pull.result(timeout=BOUND) == PolicyVersion(0, 1)
    loop.abort(["s"])
    turnstile.let_through()
    (completion,) = collector.wait_for("s")
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.versions.tolist() == [0, 0, 0, 1, 1]
    assert are_the_beginning(collector.pieces["s"], completion) == 5


def test_a_first_token_waits_for_no_burst_and_each_burst_hands_out_once_and_followers_nothing() -> None:
    collectors = [Collector(), Collector()]
    engines = [lambda: SimulatedEngine(vocab_size=VOCAB, clock=count().__next__)] * 2
    leader, follower = make_ranks(collectors, engines, burst_steps=4)
    leader.pull(make_publication(0)).result(timeout=BOUND)
    leader.submit([streaming("s", new=10), streaming("short", new=3)])
    completion, short = collectors[0].wait_for("s", "short")
    assert [len(piece.token_ids) for piece in collectors[0].pieces["s"]] == [1, 4, 4]
    assert are_the_beginning(collectors[0].pieces["s"], completion) == 9
    assert len(short.token_ids) == 3 and len(collectors[0].pieces["short"]) == 1, "it ended within the burst"
    leader.close().result(timeout=BOUND)
    follower.close().result(timeout=BOUND)
    assert not collectors[1].pieces
    assert collectors[0].digest == collectors[1].digest
