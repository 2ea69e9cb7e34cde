"""What rank 0 decides: rules by example, then any schedule of calls against a model of the inbox. Under 10 s."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loop_harness import make_publication, make_request

from titan_rl.errors import GeneratorFailed, GeneratorNotServing, RequestError
from titan_rl.generation.decisions import DecisionMaker, LoopAction
from titan_rl.types import PolicyVersion


def serving(step: int = 0, **kwargs: int) -> DecisionMaker:
    inbox = DecisionMaker(**kwargs)
    inbox.pull(make_publication(step))
    inbox.decide(False)
    inbox.verified(PolicyVersion(0, step))
    return inbox


def test_a_request_for_a_newer_version_waits_for_the_pull_that_brings_it() -> None:
    inbox = serving(1)
    inbox.submit(make_request("new", min_version=(0, 2)))
    inbox.submit(make_request("old"))
    assert [request.request_id for request in inbox.decide(False).admit] == ["old"]
    inbox.pull(make_publication(2))
    inbox.decide(True)
    inbox.verified(PolicyVersion(0, 2))
    assert [request.request_id for request in inbox.decide(True).admit] == ["new"]


class AnyScheduleOfCalls(RuleBasedStateMachine):
    """Whatever is called in whatever order: nothing is lost or admitted twice, order and precedence hold."""

    @initialize(burst=st.integers(1, 8))
    def begin(self, burst: int) -> None:
        self.inbox = DecisionMaker(burst_steps=burst)
        self.names = 0
        self.submitted: list[str] = []  # waiting, in order
        self.running: list[str] = []
        self.aborting: set[str] = set()  # of those
        self.gone: set[str] = set()
        self.sequence = 0
        self.pulls: list[int] = []  # waiting
        self.pulling: int | None = None  # decided, outcome not told
        self.wanted: LoopAction | None = None
        self.serves = self.stale = self.asleep = self.closing = False

    @property
    def refuses(self) -> bool:
        return self.closing or self.stale or self.asleep or self.wanted is LoopAction.SLEEP

    @rule()
    def submit(self) -> None:
        request = make_request(f"r{self.names}")
        self.names += 1
        if self.refuses:
            with pytest.raises(GeneratorFailed):
                self.inbox.submit(request)
        else:
            self.inbox.submit(request)
            self.submitted.append(request.request_id)

    @precondition(lambda self: self.gone and not self.refuses)
    @rule(data=st.data())
    def use_an_id_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.gone)))
        self.inbox.submit(make_request(name))
        self.gone.remove(name)
        self.submitted.append(name)

    @precondition(lambda self: not self.closing and (self.submitted or self.running))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.submitted + self.running))
        request = self.inbox.abort(name)
        if name in self.submitted:
            assert request is not None and request.request_id == name
            self.submitted.remove(name)
            self.gone.add(name)
        else:
            assert request is None
            self.aborting.add(name)

    @precondition(lambda self: not self.closing)
    @rule(step=st.integers(0, 9))
    def pull(self, step: int) -> None:
        asleep = self.asleep and self.wanted is not LoopAction.WAKE
        if asleep or self.wanted is LoopAction.SLEEP:
            with pytest.raises(GeneratorNotServing):
                self.inbox.pull(make_publication(step))
        else:
            self.inbox.pull(make_publication(step))
            self.pulls.append(step)

    @precondition(lambda self: not self.closing)
    @rule()
    def sleep(self) -> None:
        if self.wanted is LoopAction.WAKE:
            with pytest.raises(GeneratorNotServing, match="waking up"):
                self.inbox.sleep()
        else:
            self.inbox.sleep()
            self.wanted, self.pulls = LoopAction.SLEEP, []

    @precondition(lambda self: not self.closing)
    @rule(step=st.integers(0, 9))
    def wake(self, step: int) -> None:
        if self.wanted is LoopAction.SLEEP:
            with pytest.raises(GeneratorNotServing, match="falling asleep"):
                self.inbox.wake(make_publication(step))
        else:
            self.inbox.wake(make_publication(step))
            self.pulls.append(step)
            self.wanted = LoopAction.WAKE

    @precondition(lambda self: self.names > 5)
    @rule()
    def close(self) -> None:
        self.inbox.close()
        self.closing = True

    @precondition(lambda self: self.pulling is None)
    @rule()
    def decide(self) -> None:
        decision = self.inbox.decide(bool(self.running), digest=self.sequence)
        assert (decision.sequence, decision.digest) == (self.sequence, self.sequence)
        self.sequence += 1
        if self.closing:
            assert decision.action is LoopAction.CLOSE
        elif self.wanted is not None:
            assert decision.action is self.wanted
        elif self.pulls:
            assert decision.action is LoopAction.PULL_MODEL_STATE_DICT
        elif self.serves and (self.submitted or self.running):
            assert decision.action is LoopAction.STEP
        else:
            assert decision.action is LoopAction.IDLE
        admitted = [request.request_id for request in decision.admit]
        if decision.action is LoopAction.STEP:
            assert admitted == self.submitted, "all that wait come in, in order"
            assert set(decision.abort) == self.aborting, "whenever they came, also during a pull"
            self.aborting = set()
            self.running = [name for name in self.running if name not in decision.abort] + admitted
            self.gone |= set(decision.abort)
            self.submitted = []
            for name in decision.abort:
                self.inbox.finished(name)
        else:
            assert not admitted and not decision.abort
        if decision.action in (LoopAction.PULL_MODEL_STATE_DICT, LoopAction.WAKE):
            assert decision.publication == make_publication(self.pulls[-1])
            self.pulling, self.pulls = self.pulls[-1], []
            self.wanted = None
        if decision.action in (LoopAction.SLEEP, LoopAction.CLOSE):
            self.wanted, self.pulls = None, []
            self.serves = False
            self.asleep, self.stale = decision.action is LoopAction.SLEEP, False
            self._lose_everything()

    @precondition(lambda self: self.pulling is not None)
    @rule(works=st.booleans())
    def tell_how_the_pull_went(self, works: bool) -> None:
        assert self.pulling is not None
        if works:
            self.inbox.verified(PolicyVersion(0, self.pulling))
        else:
            self.inbox.failed("damaged")
            self._lose_everything()
        self.serves, self.stale, self.asleep = works, not works, False
        self.pulling = None

    @precondition(lambda self: self.pulling is None and self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.running))
        self.running.remove(name)
        self.aborting.discard(name)
        self.gone.add(name)
        self.inbox.finished(name)

    def _lose_everything(self) -> None:
        interrupted = [request.request_id for request in self.inbox.interrupt()]
        assert interrupted == self.submitted
        for name in self.running:
            self.inbox.finished(name)
        self.gone |= set(self.submitted) | set(self.running)
        self.submitted, self.running, self.aborting = [], [], set()

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        assert (self.inbox.version is not None) == self.serves
        if not self.refuses:
            for name in (*self.submitted, *self.running):
                with pytest.raises(RequestError, match="in use"):
                    self.inbox.submit(make_request(name))
        assert not self.gone & (set(self.submitted) | set(self.running))


TestAnyScheduleOfCalls = AnyScheduleOfCalls.TestCase
TestAnyScheduleOfCalls.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
