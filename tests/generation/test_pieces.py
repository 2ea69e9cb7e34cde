"""Requests that stream get their tokens as they are sampled, over simulated engines. About 1 s."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from generation_examples import make_publication, make_request
from loop_harness import BOUND, VOCAB, Collector, Turnstile, make_loop, make_ranks

from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.simulated_engine import SimulatedEngine, simulated_token
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece


def streaming(name: str, *, start: int = 0, new: int = 8, seed: int = 0) -> GenerationRequest:
    return replace(make_request(name, new=new, seed=seed), stream_from=start)


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
    for count in range(1, 4):
        turnstile.let_through()
        turnstile.wait_for_step()
        pieces = collector.wait_for_pieces("s", count)
        assert [piece.token_ids.tolist() for piece in pieces] == [
            [simulated_token(3, position, VOCAB)] for position in range(count)
        ]
    assert not collector.completions
    turnstile.let_through()
    completion, _ = collector.wait_for("s", "whole")
    assert are_the_beginning(collector.pieces["s"], completion) == 3, "the last token comes with the completion"
    assert "whole" not in collector.pieces, "who does not stream gets no pieces"


def test_a_resumed_request_counts_on_from_what_it_has(collector: Collector) -> None:
    loop = make_loop(collector, engine=lambda: SimulatedEngine(vocab_size=VOCAB))
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
    assert pull.result(timeout=BOUND).requests_in_flight == 1
    loop.abort(["s"])
    turnstile.let_through()
    (completion,) = collector.wait_for("s")
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.versions.tolist() == [0, 0, 0, 1, 1]
    assert are_the_beginning(collector.pieces["s"], completion) == 5


def test_each_burst_hands_out_once_and_followers_nothing() -> None:
    collectors = [Collector(), Collector()]
    leader, follower = make_ranks(collectors, [lambda: SimulatedEngine(vocab_size=VOCAB)] * 2, burst_steps=4)
    leader.pull(make_publication(0)).result(timeout=BOUND)
    leader.submit([streaming("s", new=10), streaming("short", new=3)])
    completion, short = collectors[0].wait_for("s", "short")
    assert [len(piece.token_ids) for piece in collectors[0].pieces["s"]] == [4, 4]
    assert are_the_beginning(collectors[0].pieces["s"], completion) == 8
    assert len(short.token_ids) == 3 and "short" not in collectors[0].pieces, "it ended within the burst"
    leader.close().result(timeout=BOUND)
    follower.close().result(timeout=BOUND)
    assert not collectors[1].pieces
    assert leader.progress == follower.progress


def test_what_was_handed_out_stays_as_it_was(collector: Collector, turnstile: Turnstile, loop: EngineLoop) -> None:
    loop.submit([streaming("s", new=3)])
    turnstile.wait_for_step()
    turnstile.let_through()
    turnstile.wait_for_step()
    (piece,) = collector.wait_for_pieces("s", 1)
    before = piece.token_ids.copy()
    turnstile.let_through(2)
    collector.wait_for("s")
    assert np.array_equal(piece.token_ids, before)
