"""In a deterministic run, who is played by which version and trained in which step follows from outcomes alone.

Thousands of interleavings of everything that can happen are driven through the buffer alone and compared with the
sequence of a run in which everything happens at once.
"""

from __future__ import annotations

import pickle
import random
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from support.saved import saved_and_read

from titan_rl.scheduling.config import StalenessLimits
from titan_rl.scheduling.group import GroupState, Outcome
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion

TRAINABLE, FILTERED, FAILED = "finished", "filtered", "failed"


@dataclass
class Run:
    """One run of `steps` steps; `outcomes` by group id."""

    p: int
    s: int
    steps: int
    outcomes: list[str]
    versions: dict[int, int] = field(default_factory=dict)  # group → step of the version that plays it
    batches: list[tuple[int, ...]] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffer = GroupBuffer(StalenessLimits(groups_per_step=self.p, max_staleness=self.s, deterministic=True))
        self.admit()

    def outcome(self, group_id: int) -> str:
        return self.outcomes[group_id % len(self.outcomes)]

    @property
    def over(self) -> bool:
        return self.buffer.trainer_version.step >= self.steps

    def admit(self) -> None:
        count = max(0, min(self.buffer.free_slots, self.steps * self.p - self.buffer.expected))
        for group in self.buffer.admit(count):
            self.versions[group.group_id] = group.min_version.step

    def end(self, group_id: int) -> None:
        """The group ends as it must."""
        if self.outcome(group_id) == TRAINABLE:
            self.buffer.finish(group_id, self.buffer.groups[group_id].min_version)
        else:
            self.buffer.drop(group_id, Outcome(self.outcome(group_id)))
        while (each := self.buffer.decide()) is not None:
            self.decided.append(each)
            self.admit()

    def running(self) -> list[int]:
        return [each for each in self.versions if self.state(each) is GroupState.RUNNING]

    def state(self, group_id: int) -> GroupState | None:
        """None: it has ended."""
        with suppress(KeyError):
            return self.buffer.groups[group_id].state
        return None

    def train(self) -> None:
        batch = self.buffer.batch
        assert batch is not None
        assert all(0 <= age <= self.s for age in batch.ages)
        self.batches.append(batch.group_ids)
        self.buffer.trained(batch.version._replace(step=batch.version.step + 1))

    def publish(self) -> None:
        self.buffer.published(self.buffer.trainer_version)

    @property
    def history(self) -> tuple[dict[int, int], list[tuple[int, ...]], list[int]]:
        return self.versions, self.batches, self.decided[: self.batches[-1][-1] + 1]


def at_once(p: int, s: int, steps: int, outcomes: list[str]) -> Run:
    run = Run(p, s, steps, outcomes)
    while not run.over:
        for group in run.buffer.waiting():
            run.end(run.buffer.start(group.group_id).group_id)
        if run.buffer.take():
            run.train()
            run.publish()
    return run


def interleaved(p: int, s: int, steps: int, outcomes: list[str], rng: random.Random) -> Run:
    """Anything that may happen happens in any order; groups are lost, and the run is killed and goes on from a cut."""
    run = Run(p, s, steps, outcomes)
    patience = rng.choice((0.05, 0.5, 0.95))  # how much rather a group ends than anything else happens
    losses = kills = 0
    cut = pickle.dumps(run)
    while not run.over:
        buffer = run.buffer
        kind = rng.random()
        waiting, running = buffer.waiting(), run.running()
        if waiting and kind < 0.4:
            buffer.start(rng.choice(waiting).group_id)
        elif running and kind < 0.4 + patience / 2:
            run.end(rng.choice(running))
        elif kind < 0.93:
            if buffer.batch is None:
                buffer.take()
            elif buffer.published_version == buffer.trainer_version:
                run.train()
            run.publish() if rng.random() < 0.7 else None
        elif kind < 0.945:
            cut = pickle.dumps(run)
        elif kind < 0.96 and kills < 6:
            kills += 1
            run = pickle.loads(cut)
            run.buffer = saved_and_read(run.buffer)
            before = run.buffer.trainer_version
            run.buffer.restart_from(PolicyVersion(before.incarnation + 1, before.step))
            run.publish()
        elif losses < 20:
            played = [each for each in run.versions if run.state(each) not in (GroupState.WAITING, None)]
            if played:
                losses += 1
                lost = buffer.lost(rng.choice(played))
                assert lost.min_version.step == run.versions[lost.group_id], "it is played by the same version again"
    return run


@settings(max_examples=60, deadline=None)
@given(
    p=st.integers(1, 4),
    s=st.integers(0, 3),
    steps=st.integers(1, 6),
    outcomes=st.lists(st.sampled_from([TRAINABLE, TRAINABLE, TRAINABLE, FILTERED, FAILED]), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_every_interleaving_ends_with_one_sequence(p: int, s: int, steps: int, outcomes: list[str], seed: int) -> None:
    outcomes = [*outcomes, TRAINABLE]
    expected = at_once(p, s, steps, outcomes).history
    assert len(expected[1]) == steps
    for number in range(10):
        assert interleaved(p, s, steps, outcomes, random.Random(f"{seed} {number}")).history == expected


def test_without_filters_a_group_is_played_by_the_version_that_frees_its_slot() -> None:
    run = at_once(p=2, s=2, steps=6, outcomes=[TRAINABLE])
    assert list(run.versions.values()) == [0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_a_filtered_groups_slot_is_free_when_those_before_it_are_decided() -> None:
    run = Run(2, 1, 9, [TRAINABLE, TRAINABLE, FILTERED, TRAINABLE])
    for group_id in range(4):
        run.buffer.start(group_id)
    run.end(2)
    assert (len(run.versions), run.decided) == (4, [])
    run.end(0)
    run.end(1)
    assert run.decided == [0, 1, 2]
    assert run.versions == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}
    assert run.buffer.waiting() == (), "version 1 is not published"
    run.buffer.take()
    run.train()
    run.publish()
    assert [group.group_id for group in run.buffer.waiting()] == [4, 5, 6]
