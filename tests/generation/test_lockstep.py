"""Two ranks that must stay the same: simulated engines in one process, then decisions between two (6 s)."""

from __future__ import annotations

import dataclasses
import random
import re
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from loop_harness import (
    BOUND,
    Collector,
    Turnstile,
    make_loop,
    make_publication,
    make_ranks,
    make_request,
    simulated_tokens,
)
from rank_processes import run_on_ranks
from support.timed_engine import TimedEngine

from titan_rl.errors import GeneratorFailed, GeneratorNotServing, InvariantError, WeightsError
from titan_rl.generation.decisions import LoopAction, LoopDecision
from titan_rl.generation.engine import Engine, StepOutput
from titan_rl.generation.lockstep import Lockstep
from titan_rl.generation.simulated_engine import SimulatedEngine
from titan_rl.processes import join_world
from titan_rl.types import FinishReason
from titan_rl.weights.manifest import Publication
from titan_rl.weights.ranks import Ranks

VOCAB = 13


def small_engine() -> Engine:
    return SimulatedEngine(vocab_size=VOCAB, max_num_seqs=8)


def test_random_calls_leave_both_ranks_with_one_digest_and_answer_everything_once() -> None:
    collectors = [Collector(), Collector()]
    leader, follower = make_ranks(collectors, [small_engine, small_engine], heartbeat_seconds=0.001)
    chance = random.Random(0)
    leader.pull(make_publication(0))
    names, version, pulls = [], 0, []
    for round_ in range(200):
        match chance.choice(["submit", "submit", "abort", "pull"]):
            case "submit":
                batch = [f"r{round_}.{index}" for index in range(chance.randint(1, 5))]
                leader.submit([make_request(name, new=chance.randint(1, 30), seed=len(name)) for name in batch])
                names += batch
            case "abort" if names:
                leader.abort([chance.choice(names)])
            case "pull":
                version += 1
                pulls.append(leader.pull(make_publication(version)))
    completions = collectors[0].wait_for(*names)
    assert all(pull.result(timeout=BOUND).step <= version for pull in pulls)
    for completion in completions:
        expected = simulated_tokens(len(completion.request_id), len(completion.token_ids), VOCAB)
        assert completion.token_ids.tolist() == expected
        assert np.all(np.diff(completion.versions) >= 0)
    leader.close().result(timeout=BOUND)
    follower.close().result(timeout=BOUND)
    assert collectors[0].digest == collectors[1].digest != digest_of()
    assert not collectors[1].completions, "only rank 0 answers"


class _StrayToken(SimulatedEngine):
    """Samples one token of step 3 differently."""

    steps = 0

    def step(self) -> StepOutput:
        output = super().step()
        self.steps += 1
        if self.steps == 3:
            output.sampled[0] = (output.sampled[0] + 1) % VOCAB
        return output


def test_one_other_token_on_a_follower_is_seen_at_the_next_decision() -> None:
    collectors, stray = [Collector(), Collector()], _StrayToken(vocab_size=VOCAB)
    leader, follower = make_ranks(collectors, [small_engine, lambda: stray], heartbeat_seconds=0.001, burst_steps=1)
    leader.pull(make_publication(0)).result(timeout=BOUND)
    leader.submit([make_request("a", new=50)])
    error = collectors[1].fatal()
    assert isinstance(error, InvariantError)
    assert re.search(r"rank 1 differs from rank 0 before decision \d+ ", str(error))
    assert stray.steps == 3, "nothing was computed after it"
    with pytest.raises(GeneratorFailed, match="InvariantError"):
        follower.close().result(timeout=BOUND)


def test_other_weights_on_a_follower_are_seen_at_the_next_decision() -> None:
    collectors = [Collector(), Collector()]
    leader, _ = make_ranks(
        collectors, [small_engine, small_engine], heartbeat_seconds=0.001, verify=(lambda *_: 7, lambda *_: 8)
    )
    leader.pull(make_publication(0)).result(timeout=BOUND)
    assert isinstance(collectors[1].fatal(), InvariantError)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_weights_that_one_rank_cannot_read_are_served_by_none(bad_rank: int) -> None:
    def gone(publication: Publication) -> list[tuple[str, object]]:
        if publication.version.step == 1:
            raise WeightsError("segment is gone")
        return []

    def whole(publication: Publication) -> list[tuple[str, object]]:
        return []

    turnstile = Turnstile()
    collectors = [Collector(), Collector()]
    engines = [lambda: TimedEngine(seconds_per_step=1.0, sleep=turnstile), SimulatedEngine]
    loads = (gone, whole) if bad_rank == 0 else (whole, gone)
    leader, follower = make_ranks(collectors, engines, load=loads, burst_steps=1, heartbeat_seconds=0.001)
    leader.pull(make_publication(0)).result(timeout=BOUND)
    leader.submit([make_request("flying", new=50)])
    turnstile.wait_for_step()
    pull = leader.pull(make_publication(1))
    turnstile.let_through()
    with pytest.raises(WeightsError, match=f"cannot be served: rank {bad_rank}: segment is gone"):
        pull.result(timeout=BOUND)
    assert collectors[0].wait_for("flying")[0].finish_reason is FinishReason.ABORT
    with pytest.raises(GeneratorNotServing, match="segment is gone"):
        leader.submit([make_request("refused")])
    turnstile.open()
    leader.pull(make_publication(2)).result(timeout=BOUND)
    leader.submit([make_request("served", new=2)])
    assert collectors[0].wait_for("served")[0].versions.tolist() == [2, 2]
    leader.close().result(timeout=BOUND)
    follower.close().result(timeout=BOUND)
    assert collectors[0].digest == collectors[1].digest


def test_the_pulse_stands_still_in_a_step_and_grows_with_decisions_and_in_what_has_a_bound_of_its_own() -> None:
    turnstile, loading, may_load = Turnstile(), threading.Semaphore(0), threading.Event()

    def load(publication: Publication) -> Iterable[tuple[str, Any]]:
        loading.release()
        assert may_load.wait(BOUND)
        return ()

    def engine() -> Engine:
        return TimedEngine(vocab_size=VOCAB, seconds_per_step=1.0, sleep=turnstile)

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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_cuda_the_first_step_may_compile_and_no_later_one(device: str) -> None:
    turnstile = Turnstile()

    def engine() -> Engine:
        return TimedEngine(vocab_size=VOCAB, seconds_per_step=1.0, sleep=turnstile)

    loop = make_loop(Collector(), engine=engine, device=device)
    loop.start().result(timeout=BOUND)
    loop.pull(make_publication(0)).result(timeout=BOUND)
    loop.submit([make_request("a", new=2)])
    turnstile.wait_for_step()
    assert (loop.pulse() < loop.pulse()) == (device == "cuda")
    turnstile.let_through(1)
    turnstile.wait_for_step()
    assert loop.pulse() == loop.pulse(), "it is taken for hung"
    turnstile.open()
    loop.close().result(timeout=BOUND)


def digest_of(*decisions: LoopDecision, fingerprint: int | None = 7) -> int:
    """Of a rank that has applied these decisions, and loaded these weights; None: it could not."""

    def verify(publication: Publication, engine: Engine) -> int:
        if fingerprint is None:
            raise WeightsError("damaged")
        return fingerprint

    lockstep = Lockstep(
        SimulatedEngine(vocab_size=VOCAB), rank=1, ranks=Ranks(None), load_publication=lambda _: [], verify=verify
    )
    for decision in decisions:
        lockstep.apply(dataclasses.replace(decision, digest=lockstep.digest))
    return lockstep.digest


def test_the_digest_tells_any_two_histories_apart() -> None:
    def step(**kwargs: object) -> LoopDecision:
        return LoopDecision(**{"sequence": 0, "action": LoopAction.STEP, "burst_steps": 4, **kwargs})  # type: ignore[arg-type]

    def pull(*version: int) -> LoopDecision:
        publication = make_publication(version[1], incarnation=version[0])
        return LoopDecision(sequence=0, action=LoopAction.PULL_MODEL_STATE_DICT, publication=publication)

    request = make_request("a")
    histories = [
        digest_of(),
        digest_of(step()),
        digest_of(step(sequence=1)),
        digest_of(step(burst_steps=2)),
        digest_of(step(action=LoopAction.IDLE)),
        digest_of(step(abort=("a",))),
        digest_of(step(admit=(request,))),
        digest_of(step(admit=(make_request("b"),))),
        digest_of(step(admit=(make_request("a", seed=1),))),
        digest_of(step(admit=(make_request("a", new=7),))),
        digest_of(step(admit=(make_request("a", prompt=(2, 3, 4, 5, 11)),))),
        digest_of(pull(0, 1)),
        digest_of(pull(0, 1), fingerprint=8),
        digest_of(pull(0, 1), fingerprint=None),
        digest_of(pull(1, 1)),
    ]
    assert len(set(histories)) == len(histories)
    assert digest_of(step(admit=(make_request("a"),))) == histories[6]


def test_a_decision_that_a_rank_missed_is_noticed() -> None:
    idle = LoopDecision(sequence=0, action=LoopAction.IDLE)
    lockstep = Lockstep(
        SimulatedEngine(), rank=1, ranks=Ranks(None), load_publication=lambda _: [], verify=lambda *_: 0
    )
    with pytest.raises(InvariantError, match="rank 1 differs from rank 0 before decision 1"):
        lockstep.apply(dataclasses.replace(idle, sequence=1, digest=digest_of(idle)))


def decisions() -> list[LoopDecision]:
    few = tuple(make_request(f"a{index}", seed=index) for index in range(2))
    many = tuple(make_request(f"b{index}", prompt=range(12), seed=2**62 + index) for index in range(300))
    return [
        LoopDecision(sequence=0, action=LoopAction.IDLE, digest=2**64 - 1),
        LoopDecision(sequence=1, action=LoopAction.PULL_MODEL_STATE_DICT, publication=make_publication(3)),
        LoopDecision(sequence=2, action=LoopAction.STEP, admit=few, abort=("x",), burst_steps=4),
        LoopDecision(sequence=3, action=LoopAction.STEP, admit=many),
        LoopDecision(sequence=4, action=LoopAction.STEP, abort=tuple(f"request-{index}" for index in range(999))),
        LoopDecision(sequence=5, action=LoopAction.CLOSE),
    ]


def exchange() -> list[LoopDecision]:
    join_world("gloo")
    ranks = Ranks(dist.group.WORLD)
    received = [ranks.broadcast(each if dist.get_rank() == 0 else None) for each in decisions()]
    dist.destroy_process_group()
    return received


def comparable(decision: LoopDecision) -> tuple[object, ...]:
    requests = [
        (request.prompt_token_ids.tolist(), dataclasses.replace(request, prompt_token_ids=np.zeros(0, np.int32)))
        for request in decision.admit
    ]
    return [(tokens, str(request)) for tokens, request in requests], dataclasses.replace(decision, admit=())


def test_decisions_of_any_length_reach_every_rank() -> None:
    for received in run_on_ranks("test_lockstep:exchange", 2):
        assert [comparable(each) for each in received] == [comparable(each) for each in decisions()]
