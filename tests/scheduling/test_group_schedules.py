"""Random schedules of everything that can happen to groups, against books kept independently of the buffer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.saved import saved_and_read

from titan_rl.scheduling.config import StalenessLimits
from titan_rl.scheduling.group import GroupState, Outcome
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion

ENDED = ("trained", "filtered", "failed")


@dataclass
class Book:
    """What the test knows of one group."""

    admitted_at: int  # newest published step then
    state: str = "waiting"
    attempt: int = 0
    oldest: int | None = None
    trained_into: int | None = None
    overtaken_by: set[int] = field(default_factory=set)  # younger groups that were trained before it


class Schedules(RuleBasedStateMachine):
    """The buffer and a twin of it, which is saved and read now and then; both see every event."""

    @initialize(p=st.integers(1, 4), s=st.integers(0, 3), w=st.integers(1, 9))
    def begin(self, p: int, s: int, w: int) -> None:
        self.p, self.s, self.w = p, s, w
        self.buffer = GroupBuffer(StalenessLimits(groups_per_step=p, max_staleness=s, window=w))
        self.twin = self.copy()
        self.books: dict[int, Book] = {}
        self.trainer = self.published = 0
        self.incarnation = self.cut = 0  # of the trainer, and the step at which it began
        self.batch: list[int] = []

    def copy(self) -> GroupBuffer:
        return saved_and_read(self.buffer)

    def both(self, method: str, *arguments):
        result = getattr(self.buffer, method)(*arguments)
        assert getattr(self.twin, method)(*arguments) == result
        return result

    def ids(self, *states: str) -> list[int]:
        return sorted(group_id for group_id, book in self.books.items() if book.state in states)

    def choose(self, data: st.DataObject, *states: str) -> int | None:
        ids = self.ids(*states)
        return data.draw(st.sampled_from(ids)) if ids else None

    @rule()
    def the_twin_is_made_anew(self) -> None:
        self.twin = self.copy()

    @rule()
    def the_run_goes_on(self) -> None:
        """From a cut at this moment: nothing serves yet, and what was being played is played again."""
        self.incarnation, self.cut = self.incarnation + 1, self.trainer
        self.both("restart_from", self.version(self.trainer))
        for group_id in self.ids("running"):
            self.books[group_id].state = "waiting"
        for group_id in self.batch:
            self.books[group_id].state = "finished"
        self.batch = []
        self.publish_newest()

    def version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self.incarnation, step)

    @precondition(lambda self: self.buffer.free_slots)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.admit_some(data.draw(st.integers(0, self.buffer.free_slots)))

    def admit_all(self) -> None:
        self.admit_some(None)

    def admit_some(self, count: int | None) -> None:
        free = self.buffer.free_slots
        groups = self.both("admit", count)
        assert len(groups) == (free if count is None else count)
        for group in groups:
            assert group.group_id == len(self.books), "ids follow each other, and none comes twice"
            assert group.min_version == self.version(self.published)
            self.books[group.group_id] = Book(self.published)

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if (group_id := self.choose(data, "waiting")) is not None:
            assert self.both("start", group_id).attempt == self.books[group_id].attempt
            self.books[group_id].state = "running"

    @rule()
    def start_all(self) -> None:
        for group_id in self.ids("waiting"):
            self.both("start", group_id)
            self.books[group_id].state = "running"

    @rule(data=st.data(), worst=st.booleans())
    def finish(self, data: st.DataObject, worst: bool) -> None:
        """Its tokens are of any versions that generators could have served to it; at worst the oldest of these."""
        if (group_id := self.choose(data, "running")) is not None:
            book = self.books[group_id]
            least = max(book.admitted_at, self.cut)
            oldest = least if worst else data.draw(st.one_of(st.none(), st.integers(least, self.published)))
            self.both("finish", group_id, None if oldest is None else self.version(oldest))
            book.state, book.oldest = "finished", oldest

    @rule(keep=st.integers(0, 2))
    def finish_all_but_the_oldest(self, keep: int) -> None:
        for group_id in self.ids("running")[keep:]:
            book = self.books[group_id]
            oldest = max(book.admitted_at, self.cut)
            self.both("finish", group_id, self.version(oldest))
            book.state, book.oldest = "finished", oldest

    @rule(stragglers=st.integers(0, 2), publish=st.booleans())
    def advance(self, stragglers: int, publish: bool) -> None:
        """A whole step of a run whose oldest groups are slow."""
        self.admit_all()
        self.start_all()
        self.finish_all_but_the_oldest(stragglers)
        self.take()
        if self.batch:
            self.train()
        if publish:
            self.publish_newest()

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if (group_id := self.choose(data, "running", "finished", "taken")) is not None:
            self.break_batch_of(group_id)
            group = self.both("lost", group_id)
            book = self.books[group_id]
            book.state, book.oldest, book.attempt = "waiting", None, book.attempt + 1
            assert (group.attempt, group.min_version.step, group.oldest) == (book.attempt, book.admitted_at, None)

    @rule(data=st.data(), outcome=st.sampled_from([Outcome.FILTERED, Outcome.FAILED]))
    def drop(self, data: st.DataObject, outcome: Outcome) -> None:
        if (group_id := self.choose(data, "waiting", "running", "finished", "taken")) is not None:
            self.break_batch_of(group_id)
            self.both("drop", group_id, outcome)
            self.books[group_id].state = outcome.value

    def break_batch_of(self, group_id: int) -> None:
        if group_id in self.batch:
            for each in self.batch:
                self.books[each].state = "finished"
            self.batch = []

    @rule()
    def take(self) -> None:
        expected = self.expected_batch()
        ready = self.buffer.ready
        batch = self.both("take")
        if batch is None:
            assert expected is None and (self.batch or ready < self.p)
            return
        assert list(batch.group_ids) == expected and len(expected) == self.p == ready
        assert batch.version.step == self.trainer
        ages = [self.trainer - book.oldest for i in expected if (book := self.books[i]).oldest is not None]
        assert list(batch.ages) == ages
        assert all(0 <= age <= (self.s and self.s + -(-(self.w - 1) // self.p)) for age in ages)
        self.batch = expected
        for group_id in expected:
            self.books[group_id].state = "taken"

    def expected_batch(self) -> list[int] | None:
        """By the definition: one group after the other, from the first W of the line, the oldest finished first."""
        if self.batch:
            return None
        chosen: list[int] = []
        while len(chosen) < self.p:
            left = [i for i in self.ids("waiting", "running", "finished") if i not in chosen]
            if not left:
                return None
            line = [i for i in self.ids("waiting", "running", "finished", "trained") if i >= left[0]]
            eligible = [i for i in line[: self.w] if self.books[i].state == "finished" and i not in chosen]
            if not eligible:
                return None
            chosen.append(eligible[0])
        return chosen

    @precondition(lambda self: self.batch)
    @rule()
    def train(self) -> None:
        self.trainer += 1
        assert list(self.both("trained", self.version(self.trainer)).group_ids) == self.batch
        for group_id in self.batch:
            self.books[group_id].state, self.books[group_id].trained_into = "trained", self.trainer
            for older in self.ids("waiting", "running", "finished"):
                if older < group_id:
                    self.books[older].overtaken_by.add(group_id)
        self.batch = []

    @precondition(lambda self: self.published < self.trainer)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.published = data.draw(st.integers(self.published + 1, self.trainer))
        self.both("published", self.version(self.published))

    def publish_newest(self) -> None:
        self.published = self.trainer
        self.both("published", self.version(self.published))

    @invariant()
    def the_books_agree(self) -> None:
        counts = self.buffer.counts
        left = sum(counts[name] for name in ("trained", "filtered", "failed", "active"))
        assert counts["admitted"] == left == len(self.books)
        for state in (*GroupState, *ENDED):
            assert counts[state] == len(self.ids(state)), state
        assert [group.group_id for group in self.buffer.waiting()] == self.ids("waiting")
        assert counts["trained"] == self.p * self.trainer

    @invariant()
    def slots_are_held_until_the_version_is_published(self) -> None:
        unpublished = [b for b in self.books.values() if b.trained_into is not None and b.trained_into > self.published]
        held = self.buffer.counts["active"] + len(unpublished)
        assert held + self.buffer.free_slots == (self.s + 1) * self.p
        assert self.buffer.free_slots >= 0

    @invariant()
    def at_most_w_minus_1_younger_groups_are_trained_before_any_group(self) -> None:
        assert all(len(book.overtaken_by) < self.w for book in self.books.values())

    @invariant()
    def the_twin_is_the_same(self) -> None:
        assert vars(self.twin).keys() == vars(self.buffer).keys()
        assert self.twin.counts == self.buffer.counts
        assert self.twin.waiting() == self.buffer.waiting()
        assert self.twin.waits_for() == self.buffer.waits_for()

    def teardown(self) -> None:
        """Nobody starves: when everything started finishes, what is inside now is trained within a stated count."""
        if not hasattr(self, "buffer"):
            return
        inside = set(self.ids(*GroupState))
        bound = -(-((self.s + 1) * self.p + self.w - 1) // self.p)
        for _ in range(bound + 1):
            if not inside & set(self.ids(*GroupState)):
                break
            if not self.batch:
                self.publish_newest()
                self.admit_all()
                self.start_all()
                self.finish_all_but_the_oldest(0)
                self.take()
                assert self.batch, self.buffer.waits_for()
            self.train()
        assert not inside & set(self.ids(*GroupState))
        self.the_books_agree()


@pytest.mark.parametrize("steps", [30, 80])
def test_random_schedules_keep_every_promise(steps):
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=150,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
