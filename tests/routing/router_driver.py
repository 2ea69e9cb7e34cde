"""The router actor without its messages: what it does with the pure parts, one event per method.

Engines are a dict; a test says when and how attempts and pulls end.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from router_books import LEFT, LIVE, WAITING, Caller, Pull, RouterBooks
from routing_examples import completion

from titan_rl.errors import GeneratorNotServing, RequestLost, RequestTimeout, WeightsError
from titan_rl.routing.dispatcher import Assignment
from titan_rl.routing.generator import GeneratorState
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion

NEVER = PolicyVersion(-1, 0)


class RouterDriver(RouterBooks):
    """Dispatcher, fleet and strategy, wired as in the actor."""

    # Requests.

    def arrive(self, requests: Iterable[GenerationRequest]) -> None:
        entering: list[GenerationRequest] = []
        for asked in requests:
            assert self.dispatcher.refusal(asked) is None
            caller = self.callers[asked.request_id] = Caller(asked, WAITING)
            caller.queued_at = self.now
            entering.append(asked)
        pins = self.pins()
        self._took(self.dispatcher.submit(entering, self.now), pins)
        self._fail_what_nobody_serves()

    def answer(self, answers: Iterable[tuple[str, int, FinishReason]]) -> None:
        """One message from an engine: attempt id, tokens sampled (at most what is left), reason."""
        interrupted = False
        for attempt_id, sampled, reason in answers:
            assignment, caller = self.live.pop(attempt_id)
            budget = assignment.request.sampling.max_new_tokens
            version = self.fleet[assignment.generator].version
            assert version is not None
            part = completion(
                assignment.request, min(sampled, budget), reason, version=version, generator=assignment.generator
            )
            passed_on = self.dispatcher.ended_whole(attempt_id, reason)
            assert not (passed_on and caller.segments), "tokens of earlier attempts would be lost"
            whole = part if passed_on else self.dispatcher.completed(attempt_id, part, self.now)
            assert not self.dispatcher.ended_whole(attempt_id, reason)
            assert self.dispatcher.completed(attempt_id, part, self.now) is None, "a late answer is nobody's"
            goes_on = reason is FinishReason.ABORT and len(part.token_ids) < budget and not caller.given_up
            assert (whole is None) == goes_on
            if whole is None:
                interrupted = True
                if self.resume and len(part.token_ids):
                    caller.segments.append(part)
                self._queued(caller)
            elif caller.place == LEFT:  # its time was over before the engine stopped it
                continue
            else:
                caller.segments.append(part)
                self._answered(caller, whole)
                if reason is not FinishReason.ABORT:
                    assert whole.finish_reason is reason
                elif not caller.given_up:
                    assert whole.finish_reason is FinishReason.LENGTH
        if interrupted:
            self.advance()

    def deliver(self, attempt_ids: Iterable[str]) -> None:
        """These end well."""
        self.answer([(attempt_id, 1, FinishReason.STOP) for attempt_id in attempt_ids])

    def refuse(self, attempt_id: str) -> None:
        """The generator says that the request itself is at fault."""
        _, caller = self.live.pop(attempt_id)
        assert self.dispatcher.ended(attempt_id) == caller.asked.request_id
        assert self.dispatcher.ended(attempt_id) is None
        self._leaves(caller, late=True)

    def lose(self, attempt_ids: Iterable[str], *, fatal: bool = False) -> None:
        """Attempts end with an error of their generator; a fatal one says that it is gone."""
        for attempt_id in attempt_ids:
            assignment, caller = self.live.pop(attempt_id)
            rest = self.dispatcher.lost(
                attempt_id, self.now, died=f"{assignment.generator} was killed" if fatal else ""
            )
            assert (rest is not None) == caller.given_up
            caller.deaths += fatal
            if rest is not None:
                assert rest.finish_reason is FinishReason.ABORT
                if caller.place != LEFT:
                    self._answered(caller, rest)
            elif caller.deaths > self.request_retries:
                ((request_id, error),) = self.dispatcher.failures()
                assert request_id == caller.asked.request_id and isinstance(error, RequestLost)
                assert str(error).count("was killed") == caller.deaths
                self._leaves(caller)
            else:
                self._queued(caller)
            if fatal:
                self.fleet.died(assignment.generator, f"killed at {self.now}")
                self._dead(assignment.generator)
        self.advance()

    def die(self, name: str) -> None:
        """Its process ends; the controller says so."""
        self.fleet.died(name, f"killed at {self.now}")
        self._dead(name)
        self.lose(self.live_on(name), fatal=True)

    def join(self, name: str) -> None:
        """A replacement of a dead generator is up."""
        if self.fleet[name].state is not GeneratorState.DEAD:
            with pytest.raises(ValueError, match="is already in the fleet"):
                self.fleet.joined(name)
            return
        self.fleet.joined(name)
        for book in (self.failures, self.reached, self.held):
            book.pop(name, None)
        self.left.add(name)  # it has no session's prefix: nobody waits for it
        self.advance()

    def leave_out(self, name: str) -> None:
        self.die(name)
        self.fleet.left_out(name, "given up")
        self.advance()

    def abort(self, request_id: str) -> None:
        """The caller gives up. A live attempt's answer is still to come, whatever it will be."""
        caller = self.callers[request_id]
        outcome = self.dispatcher.abort(request_id)
        match caller.place:
            case "live":
                assert isinstance(outcome, Assignment) and outcome.request.request_id in self.live
                caller.given_up = True
            case "waiting":
                assert isinstance(outcome, Completion) and outcome.finish_reason is FinishReason.ABORT
                self._answered(caller, outcome)
            case _:
                stops = isinstance(outcome, Assignment) and outcome.request.request_id in self.live
                assert outcome is None or stops, "an answered request is unknown, once its engine has stopped it"

    def tick(self, seconds: float) -> None:
        self.now += seconds
        if self.dispatcher.wake_at is not None and self.dispatcher.wake_at <= self.now:
            self._overdue()
            self._reconsider()
            self._fail_what_nobody_serves()

    # Weights.

    def advance(self) -> None:
        self._reconsider()
        self._fail_what_nobody_serves()
        served = {name for name in self.names if self.fleet[name].state is GeneratorState.SERVING}
        started = self.fleet.startable(self.dispatcher.load)
        for name in started:
            assert name not in self.syncs, "one pull at a time"
            self.syncs[name] = None
            if self.fleet[name].state is GeneratorState.SYNCING and name in served:
                self.closed.add(name)
        turns = [(self.held.get(name, NEVER), self.dispatcher.load(name)) for name in started]
        assert turns == sorted(turns), "the oldest version first, and of equals the least load"
        for pull in self.pulls:
            if not pull.done and self.fleet.settled(pull.version):
                pull.done = True
                self.check_settled(pull)

    def pull(self, version: PolicyVersion) -> None:
        target = self.fleet.target
        if target is not None and version < target:
            with pytest.raises(WeightsError, match="pull refused"):
                self.fleet.ask(version)
            return
        self.fleet.ask(version)
        self.failures = (
            {} if version != target else {name: n for name, n in self.failures.items() if name in self.syncs}
        )
        self.pulls.append(Pull(version))
        self.advance()

    def can_begin(self, name: str) -> bool:
        return self.syncs.get(name, ...) is None and not (self.fleet.must_drain(name) and self.live_on(name))

    def begin_pull(self, name: str) -> None:
        """The generator is idle, or need not be: its pull begins."""
        version = self.fleet.pulling(name)
        assert version == self.fleet.target, "pulls coalesce to the newest"
        self.syncs[name] = version

    def end_pull(self, name: str, outcome: str) -> None:
        """`verified`, `failed` or `died`."""
        version = self.syncs.pop(name)
        assert version is not None
        self.late.discard(name)
        for pull in self.pulls:
            pull.woke |= pull.wakes == name
        match outcome:
            case "verified":
                self.fleet.verified(name, version)
                assert version >= self.held.get(name, version), "weights never go back"
                self.held[name] = self.reached[name] = version
                self.failures.pop(name, None)
                assert self.fleet[name].state is GeneratorState.SERVING, "what was verified serves"
                self.closed.discard(name)
                self.left.discard(name)
            case "failed":
                self.fleet.failed(name, f"bad bytes in {version}")
                self.closed.discard(name)
                if version == self.fleet.target:
                    self.failures[name] = self.failures.get(name, 0) + 1
                self.left.add(name)
                assert self.fleet[name].reason == f"bad bytes in {version}"
            case "died":
                self.die(name)
        self.advance()

    def is_late(self, name: str) -> None:
        """The sync takes too long, and goes on."""
        self.fleet.late(name, "too slow")
        assert self.fleet[name].state is GeneratorState.STALE
        self.late.add(name)
        self.left.add(name)
        self.closed.discard(name)
        for pull in self.pulls:
            pull.woke |= pull.wakes == name
        self.advance()

    def drain_deadline(self, name: str) -> None:
        """Stragglers are interrupted: they come back with what they have."""
        self.answer([(attempt_id, 1, FinishReason.ABORT) for attempt_id in self.live_on(name)])

    def sleep(self, name: str) -> None:
        state = self.fleet[name].state
        may = state in (GeneratorState.SERVING, GeneratorState.STALE, GeneratorState.RECOVERING)
        if not may or name in self.syncs:
            with pytest.raises(GeneratorNotServing):
                self.fleet.sleep(name)
            return
        self.fleet.sleep(name)
        self.reached.pop(name, None)
        self.advance()
        assert self.fleet[name].state is GeneratorState.ASLEEP

    def wake(self, name: str) -> None:
        health = self.fleet[name]
        if health.state is not GeneratorState.ASLEEP or health.is_spare or self.fleet.target is None:
            with pytest.raises(GeneratorNotServing):
                self.fleet.wake(name)
            return
        self.fleet.wake(name)
        assert self.fleet[name].must_wake
        self.failures.pop(name, None)
        self.pulls.append(Pull(self.fleet.target, wakes=name))
        self.advance()
        assert self.fleet[name].state is GeneratorState.SYNCING

    def pin(self, version: PolicyVersion) -> str | None:
        """The pinned generator; None where there can be none."""
        serving = [name for name in self.names if self.fleet[name].state is GeneratorState.SERVING]
        free = [name for name in serving if self.fleet[name].version == version and name not in self.syncs]
        if not free or len(serving) == 1:
            with pytest.raises(GeneratorNotServing, match="cannot be pinned|can be pinned"):
                self.fleet.pin(version, self.dispatcher.load)
            return None
        name = self.fleet.pin(version, self.dispatcher.load)
        assert name in free and self.dispatcher.load(name) == min(map(self.dispatcher.load, free))
        self.pinned[name] = version
        self.dispatcher.pinned(name, version)
        self.advance()
        assert self.anyone_serves, "somebody else serves"
        return name

    def unpin(self, name: str) -> None:
        if name not in self.pinned:
            with pytest.raises(GeneratorNotServing, match="cannot be unpinned"):
                self.fleet.unpin(name)
            return
        self.fleet.unpin(name)
        self.dispatcher.unpinned(name)
        del self.pinned[name]
        self.failures.pop(name, None)
        self.reached.pop(name, None)
        assert self.fleet.target is not None
        self.pulls.append(Pull(self.fleet.target, wakes=name))
        self.advance()
        assert self.fleet[name].state is GeneratorState.SYNCING

    def _dead(self, name: str) -> None:
        self.closed.discard(name)
        self.late.discard(name)
        self.pinned.pop(name, None)
        self.syncs.pop(name, None)
        for pull in self.pulls:
            pull.woke |= pull.wakes == name
        self.dispatcher.unpinned(name)

    # Until nothing is left to happen.

    def become_quiet(self) -> None:
        """No more failures: every sync ends well, every attempt finishes, who must be replaced is."""
        for _ in range(12 * (len(self.names) + 1)):
            for name in list(self.syncs):
                if self.can_begin(name):
                    self.begin_pull(name)
                if self.syncs.get(name) is not None:
                    self.end_pull(name, "verified")
            for attempt_id in list(self.live):
                self.answer([(attempt_id, 2, FinishReason.STOP)])
            self.tick(self.sync_wait)
            self.check()
            if not self.syncs and not self.live:
                if self.fleet.target is None or self.fleet.settled(self.fleet.target):
                    break
                for health in list(self.fleet):
                    if health.is_awaited:
                        self.join(health.name)
        else:
            raise AssertionError("it never becomes quiet")
        self.check_quiet()

    def _took(self, assignments: list[Assignment], pins: dict[str, str | None]) -> None:
        for assignment in assignments:
            attempt, name = assignment.request, assignment.generator
            caller = self.callers[attempt.request_id.partition("~")[0]]
            asked = caller.asked
            assert caller.place == WAITING, "a request is in one place"
            assert self.can_serve(name, asked)
            assert attempt.request_id not in self.attempts, "an attempt id names one attempt"
            self.attempts.add(attempt.request_id)
            assert attempt.prompt_token_ids.tolist() == [*asked.prompt_token_ids.tolist(), *caller.sampled]
            left = asked.sampling.max_new_tokens - len(caller.sampled)
            assert attempt.sampling.max_new_tokens == left > 0
            assert attempt.seed == asked.seed, "noise depends on the position too"
            if asked.session_id is not None:
                if asked.pinned_to is None:
                    self.check_pin(caller, name, pins.get(asked.session_id))
                pins[asked.session_id] = name
            caller.place, caller.began = LIVE, self.now
            self.live[attempt.request_id] = (assignment, caller)

    def _reconsider(self) -> None:
        pins = self.pins()
        self._took(self.dispatcher.reconsider(self.now), pins)

    def _queued(self, caller: Caller) -> None:
        caller.place, caller.queued_at = WAITING, self.now
        caller.seconds += self.now - caller.began

    def _overdue(self) -> None:
        """Those whose time is over are aborted, and their callers know."""
        aborts = {assignment.request.request_id for assignment in self.dispatcher.overdue(self.now)}
        failures = dict(self.dispatcher.failures())
        for attempt_id, (_, caller) in self.live.items():
            over = caller.seconds + self.now - caller.began >= self.request_seconds > 0
            assert (attempt_id in aborts) == (over and not caller.given_up)
            if attempt_id in aborts:
                assert isinstance(failures.pop(caller.asked.request_id), RequestTimeout)
                caller.given_up = True
                self._leaves(caller)
        assert not failures

    def _answered(self, caller: Caller, whole: Completion) -> None:
        assert whole.request_id == caller.asked.request_id
        assert whole.token_ids.tolist() == caller.sampled
        assert len(whole.token_ids) == len(whole.logprobs) == len(whole.versions)
        assert len(whole.token_ids) <= caller.asked.sampling.max_new_tokens
        assert whole.versions.tolist() == [int(v) for part in caller.segments for v in part.versions]
        self._leaves(caller)

    def _leaves(self, caller: Caller, *, late: bool = False) -> None:
        assert caller.place != LEFT or (late and caller.given_up), "a request leaves once"
        caller.place = LEFT

    def _fail_what_nobody_serves(self) -> None:
        for request_id, error in self.dispatcher.failures():
            caller = self.callers[request_id]
            assert "is not any more" in str(error)
            assert caller.place == WAITING and caller.asked.pinned_to not in {None, *self.pinned}
            self._leaves(caller)
        if self.fleet.is_given_up:
            for request_id in self.dispatcher.drop_waiting():
                assert self.callers[request_id].place == WAITING
                self._leaves(self.callers[request_id])
