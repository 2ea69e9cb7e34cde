"""The router actor without its messages: what it does with the pure parts, one event per method.

Engines are a dict; a test says when and how attempts and pulls end.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from router_books import LEFT, LIVE, WAITING, Caller, Pull, RouterBooks
from routing_examples import completion

from titan_rl.errors import GeneratorNotServing, RequestLost
from titan_rl.routing.dispatcher import Assignment
from titan_rl.routing.health import GONE, Phase
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion

NEVER = PolicyVersion(-1, 0)


class RouterDriver(RouterBooks):
    """Dispatcher, fleet and strategy, wired as in the actor."""

    # Requests.

    def arrive(self, requests: Iterable[GenerationRequest]) -> None:
        entering: list[GenerationRequest] = []
        for asked in requests:
            self.callers[asked.request_id] = Caller(asked, WAITING)
            entering.append(asked)
        homes = self.homes()
        self._took(self.dispatcher.submit(entering), homes)
        self._fail_what_nobody_serves()
        if len(self.plan.wanted) > 1:
            self.advance()

    def answer(self, answers: Iterable[tuple[str, int, FinishReason]]) -> None:
        """One message from an engine: attempt id, tokens sampled (at most what is left), reason."""
        interrupted, generators = False, set()
        for attempt_id, sampled, reason in answers:
            assignment, caller = self.live.pop(attempt_id)
            budget = assignment.request.sampling.max_new_tokens
            generators.add(assignment.generator)
            version = self.fleet[assignment.generator].version
            assert version is not None
            part = completion(
                assignment.request, min(sampled, budget), reason, version=version, generator=assignment.generator
            )
            passed_on = self.dispatcher.ended_whole(attempt_id, reason)
            assert not (passed_on and caller.segments), "tokens of earlier attempts would be lost"
            whole = part if passed_on else self.dispatcher.completed(attempt_id, part)
            assert not self.dispatcher.ended_whole(attempt_id, reason)
            assert self.dispatcher.completed(attempt_id, part) is None, "a late answer is nobody's"
            goes_on = reason is FinishReason.ABORT and len(part.token_ids) < budget and not caller.given_up
            assert (whole is None) == goes_on
            if whole is None:
                interrupted = True
                if self.config.resume and len(part.token_ids):
                    caller.segments.append(part)
                self._queued(caller)
            else:
                caller.segments.append(part)
                self._answered(caller, whole)
                if reason is not FinishReason.ABORT:
                    assert whole.finish_reason is reason
                elif not caller.given_up:
                    assert whole.finish_reason is FinishReason.LENGTH
        if interrupted or (self.dispatcher.waiting and not all(map(self.dispatcher.in_flight, generators))):
            self.advance()

    def deliver(self, attempt_ids: Iterable[str]) -> None:
        """These end well."""
        self.answer([(attempt_id, 1, FinishReason.STOP) for attempt_id in attempt_ids])

    def refuse(self, attempt_id: str) -> None:
        """The generator says that the request itself is at fault."""
        _, caller = self.live.pop(attempt_id)
        assert self.dispatcher.ended(attempt_id) == caller.asked.request_id
        assert self.dispatcher.ended(attempt_id) is None
        self._leaves(caller)
        self.advance()  # as the router does after any failure

    def lose(self, attempt_ids: Iterable[str], *, fatal: bool = False) -> None:
        """Attempts end with an error of their generator; a fatal one says that it is gone."""
        for attempt_id in attempt_ids:
            assignment, caller = self.live.pop(attempt_id)
            rest = self.dispatcher.lost(attempt_id, died=f"{assignment.generator} was killed" if fatal else "")
            assert (rest is not None) == caller.given_up
            caller.deaths += fatal
            if rest is not None:
                assert rest.finish_reason is FinishReason.ABORT
                self._answered(caller, rest)
            elif caller.deaths > self.config.request_retries:
                ((request_id, error),) = self.dispatcher.failures()
                assert request_id == caller.asked.request_id and isinstance(error, RequestLost)
                assert str(error).count("was killed") == caller.deaths
                self._leaves(caller)
            else:
                self._queued(caller)
            if fatal:
                self.fleet.died(assignment.generator, "killed")
                self._dead(assignment.generator)
        self.advance()

    def die(self, name: str) -> None:
        """Its process ends; the controller says so."""
        self.fleet.died(name, "killed")
        self._dead(name)
        self.lose(self.live_on(name), fatal=True)

    def join(self, name: str) -> None:
        """A replacement of a dead generator is up."""
        if self.fleet[name].phase not in GONE:
            with pytest.raises(ValueError, match="is already in the fleet"):
                self.fleet.join(name)
            return
        self.fleet.join(name)
        for book in (self.failures, self.held):
            book.pop(name, None)
        self.advance()

    def leave_out(self, name: str) -> None:
        self.die(name)
        self.fleet.give_up(name, "given up")
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
                assert outcome is None, "an answered request is unknown"

    # Weights.

    def advance(self) -> None:
        self._reconsider()
        self._fail_what_nobody_serves()
        served = {name: self.fleet[name].version for name in self.names if self.fleet[name].phase is Phase.SERVING}
        started = self.plan.begin(self.dispatcher)
        for name in started:
            assert name not in self.syncs, "one pull at a time"
            self.syncs[name] = None
            if self.fleet[name].phase is Phase.DRAINING:
                self.closed.add(name)
                exact = any(self.live[each][1].asked.exact_version for each in self.live_on(name))
                exact |= self.fleet[name].version in self.plan.wanted
                assert self.config.weight_sync == "drain" or exact, "a hot swap closes nobody else"
            left = served.pop(name, None)
            if left in self.plan.wanted and left not in served.values():
                assert not self.live_on(name) and self.dispatcher.waiting, "the last that serves a wanted version stays"
        turns = [(self.held.get(name, NEVER), self.dispatcher.load(name)) for name in started]
        assert turns == sorted(turns), "the oldest version first, and of equals the least load"
        for pull in self.pulls:
            counted = pull.version if pull.version in self.plan.wanted else self.plan.wanted[-1]
            if not pull.done and self.plan.settled(counted):
                pull.done = True
                self.check_settled(counted)

    def pull(self, *versions: PolicyVersion) -> None:
        """Exactly these are wanted, and those that open requests ask for."""
        exact = {caller.asked.exact_version for caller in self.callers.values() if caller.place != LEFT}
        self.plan.want({*versions, *(exact - {None})})
        self.failures = {
            name: n for name, n in self.failures.items() if self.fleet[name].kind.pulls in self.plan.wanted
        }
        self.pulls.append(Pull(max(versions)))
        self.advance()

    def can_begin(self, name: str) -> bool:
        return self.syncs.get(name, ...) is None and not (
            self.fleet[name].phase is not Phase.SWAPPING and self.live_on(name)
        )

    def begin_pull(self, name: str) -> None:
        """The generator is idle, or need not be: its pull begins."""
        version = self.plan.pulling(name)
        assert version in self.plan.wanted
        self.syncs[name] = version

    def end_pull(self, name: str, outcome: str) -> None:
        """`verified`, `failed` or `died`."""
        version = self.syncs.pop(name)
        assert version is not None
        self.late.discard(name)
        match outcome:
            case "verified":
                self.plan.verified(name, version)
                self.held[name] = version
                self.failures.pop(name, None)
                assert self.fleet[name].phase is Phase.SERVING, "what was verified serves"
                self.closed.discard(name)
            case "failed":
                self.plan.failed(name, f"bad bytes in {version}")
                self.closed.discard(name)
                if version in self.plan.wanted:
                    self.failures[name] = self.failures.get(name, 0) + 1
                assert self.fleet[name].reason == f"bad bytes in {version}"
            case "died":
                self.die(name)
        self.advance()

    def is_late(self, name: str) -> None:
        """The sync takes too long, and goes on."""
        self.fleet[name].late("too slow")
        assert self.fleet[name].phase is Phase.LATE
        self.late.add(name)
        self.closed.discard(name)
        self.advance()

    def drain_deadline(self, name: str) -> None:
        """Stragglers are interrupted: they come back with what they have."""
        self.answer([(attempt_id, 1, FinishReason.ABORT) for attempt_id in self.live_on(name)])

    def sleep(self, name: str) -> None:
        if self.fleet[name].phase not in (Phase.SERVING, Phase.STALE, Phase.RECOVERING):
            with pytest.raises(GeneratorNotServing):
                self.fleet[name].sleep()
            return
        self.fleet[name].sleep()
        self.advance()
        assert self.fleet[name].phase is Phase.ASLEEP

    def wake(self, name: str) -> None:
        health = self.fleet[name]
        if health.phase is not Phase.ASLEEP:
            with pytest.raises(GeneratorNotServing):
                health.wake()
            return
        health.wake()
        self.failures.pop(name, None)
        self.advance()
        assert health.must_wake and (not self.plan.wanted or health.phase is Phase.PULLING)

    def _dead(self, name: str) -> None:
        self.closed.discard(name)
        self.late.discard(name)
        self.syncs.pop(name, None)

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
            self.check()
            if not self.syncs and not self.live:
                dead = [health.name for health in self.fleet if health.phase is Phase.DEAD]
                if not dead or not (self.dispatcher.waiting or not all(pull.done for pull in self.pulls)):
                    break
                for name in dead:
                    self.join(name)
        else:
            raise AssertionError("it never becomes quiet")
        self.check_quiet()

    def _took(self, assignments: list[Assignment], homes: dict[str, str | None]) -> None:
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
                self.check_home(caller, name, homes.get(asked.session_id))
                homes[asked.session_id] = name
            caller.place = LIVE
            self.live[attempt.request_id] = (assignment, caller)

    def _reconsider(self) -> None:
        homes = self.homes()
        self._took(self.dispatcher.reconsider(), homes)

    def _queued(self, caller: Caller) -> None:
        caller.place = WAITING

    def _answered(self, caller: Caller, whole: Completion) -> None:
        assert whole.request_id == caller.asked.request_id
        assert whole.token_ids.tolist() == caller.sampled
        assert len(whole.token_ids) <= caller.asked.sampling.max_new_tokens
        for name in ("logprobs", "versions"):
            parts = [value for part in caller.segments for value in getattr(part, name).tolist()]
            assert getattr(whole, name).tolist() == parts
        self._leaves(caller)

    def _leaves(self, caller: Caller) -> None:
        assert caller.place != LEFT, "a request leaves once"
        caller.place = LEFT

    def _fail_what_nobody_serves(self) -> None:
        assert not self.dispatcher.failures()
        if self.fleet.is_given_up:
            for request_id in self.dispatcher.drop_waiting():
                assert self.callers[request_id].place == WAITING
                self._leaves(self.callers[request_id])
