"""The planned engine is the simulated engine, without its steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timed_engine import TimedEngine

from titan_rl.planner.scenario import EngineSpeed, PlannedEngine, Sequence
from titan_rl.types import GenerationRequest, PolicyVersion, SamplingParams


class SteppedEngine:
    """The simulated engine, stepped one token at a time in simulated time, as the engine loop does it: what arrived
    joins between two steps, and so do new weights."""

    def __init__(self, speed: EngineSpeed) -> None:
        self.now = 0.0
        self.engine = TimedEngine(
            max_model_len=10_000,
            max_num_seqs=speed.max_num_seqs,
            seconds_per_step=speed.seconds_per_step,
            seconds_per_sequence=speed.seconds_per_sequence,
            seconds_per_load=speed.seconds_per_load,
            sleep=self.sleep,
            clock=lambda: self.now,
        )
        self.engine.load_weights([], PolicyVersion(0, 0))
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, arrivals: list[tuple[float, str, int]], pulls: list[float]) -> dict[str, tuple[float, int]]:
        """Request id → when it finished, and the version that sampled its first token."""
        finished: dict[str, tuple[float, int]] = {}
        version = 0
        while arrivals or pulls or self.engine.has_work():
            if not self.engine.has_work():
                self.now = max(self.now, min([*(a[0] for a in arrivals[:1]), *pulls[:1]]))
            if pulls and pulls[0] <= self.now + 1e-9:
                pulls = pulls[1:]
                version += 1
                self.engine.load_weights([], PolicyVersion(0, version))
                continue
            while arrivals and arrivals[0][0] <= self.now + 1e-9:
                _, request_id, length = arrivals.pop(0)
                self.engine.add(
                    GenerationRequest(
                        request_id=request_id,
                        prompt_token_ids=np.zeros(1, np.int32),
                        sampling=SamplingParams(max_new_tokens=length),
                        seed=0,
                    )
                )
            if not self.engine.has_work():
                continue
            for completion in self.engine.step().finished:
                first = PolicyVersion.decode(completion.versions[0]).step
                finished[completion.request_id] = (self.now, first)
        return finished


def planned(
    speed: EngineSpeed, arrivals: list[tuple[float, str, int]], pulls: list[float]
) -> tuple[dict[str, tuple[float, int]], PlannedEngine, int]:
    engine = PlannedEngine(speed, PolicyVersion(0, 0))
    finished: dict[str, tuple[float, int]] = {}
    boundaries = 0
    requests = [(time, 1, request_id, length) for time, request_id, length in arrivals]
    coming = sorted([(time, 0, "", 0) for time in pulls] + requests, key=lambda event: event[:2])
    version = 0
    while coming or engine.due != float("inf"):
        if coming and coming[0][0] <= engine.due:
            time, is_request, request_id, length = coming.pop(0)
            if is_request:
                engine.add(Sequence(request_id, 0, 1, length), time)
            else:
                version += 1
                engine.pull(PolicyVersion(0, version), time)
            continue
        boundaries += 1
        time = engine.due
        for sequence in engine.boundary()[0]:
            finished[sequence.request_id] = (time, sequence.version.step)
    return finished, engine, boundaries


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 25),
    max_num_seqs=st.integers(1, 6),
    per_sequence=st.sampled_from([0.0, 0.125, 0.5]),
    load=st.sampled_from([0.0, 3.0]),
)
def test_every_request_finishes_when_the_simulated_engine_finishes_it(seed, count, max_num_seqs, per_sequence, load):
    """Arrivals at any time; weights change at times apart enough for one pull to end before the next."""
    chance = random.Random(seed)
    speed = EngineSpeed(
        seconds_per_step=1.0, seconds_per_sequence=per_sequence, seconds_per_load=load, max_num_seqs=max_num_seqs
    )
    times = sorted(chance.choice([chance.uniform(0, 100), chance.randint(0, 100)]) for _ in range(count))
    arrivals = [(time, f"r{index}", chance.randint(1, 30)) for index, time in enumerate(times)]
    pulls = [20.0 * k + chance.uniform(0, 8) for k in range(1, chance.randint(1, 5))]
    expected = SteppedEngine(speed).run(list(arrivals), list(pulls))
    found, engine, boundaries = planned(speed, arrivals, pulls)
    assert found.keys() == expected.keys()
    for request_id, (time, first_version) in expected.items():
        assert found[request_id][0] == pytest.approx(time, abs=1e-6)
        assert found[request_id][1] == first_version
    assert engine.idle
    assert boundaries <= 2 * (count + len(pulls) + 1) + len(pulls), "however many tokens lie between, it is one event"


def test_prefill_delays_the_step_that_a_request_joins_in():
    speed = EngineSpeed(seconds_per_step=1.0, seconds_per_prompt_token=0.5)
    engine = PlannedEngine(speed, PolicyVersion(0, 0))
    engine.add(Sequence("a", 0, 10, 3), 0.0)
    engine.boundary()
    assert engine.due == 8.0
    engine.add(Sequence("b", 0, 4, 1), 1.0)
    assert engine.due == 6.0, "prefill and the first step are one"
    engine.boundary()
    assert engine.due == 9.0, "2 s of prefill, then both sample a token"
    assert [sequence.request_id for sequence in engine.boundary()[0]] == ["b"]


@pytest.mark.parametrize("keep", [False, True])
def test_after_a_hot_swap_the_kv_of_what_runs_is_computed_again_or_kept(keep):
    speed = EngineSpeed(
        seconds_per_step=1.0, seconds_per_prompt_token=0.5, seconds_per_load=10.0, keep_prefix_cache=keep
    )
    engine = PlannedEngine(speed, PolicyVersion(0, 0))
    engine.add(Sequence("a", 0, 4, 5), 0.0)
    engine.boundary()
    assert engine.due == 7.0
    engine.pull(PolicyVersion(0, 1), 3.5)
    assert engine.due == 4.0
    assert engine.boundary() == ([], None)
    assert engine.due == 14.0
    assert engine.boundary() == ([], PolicyVersion(0, 1))
    assert engine.due == 14.0 + 6 * 0.5 * (not keep) + 3 * 1.0, "4 prompt tokens and 2 sampled ones; 3 are left"
