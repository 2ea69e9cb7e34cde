"""The router's requests: from its callers to the generators and back, over as many attempts as it takes.

Every request that was taken in is answered once: by a generator to its caller straight away, or from here, stitched,
interrupted or failed with the cause. Who serves what is the `Dispatcher`'s decision; this class moves messages and
waits. An event per generator is set while it is idle: a drain waits for it. The door is open while anybody serves:
requests that come to a closed one go through together, in order, as soon as it opens.

Pieces of completions that stream pass through here, unlike the completions themselves: what a caller was shown is what
another attempt must go on from when the generator is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from titan_rl.actors.calls import is_fatal
from titan_rl.actors.reply_desk import Reply, ReplyDesk
from titan_rl.actors.transport import RequestClient
from titan_rl.errors import GeneratorFailed, RequestError, TitanError
from titan_rl.routing.attempts import nothing_sampled
from titan_rl.routing.dispatcher import Assignment, Dispatcher
from titan_rl.routing.fleet import FleetHealth
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece

NOTE_SECONDS = 1.0
"""Clients are told this often which requests generators have answered to them. They need it only to miss an answer that
was lost with its generator."""

_log = logging.getLogger(__name__)


class RouterRequests:
    """Belongs to the router's event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        fleet: FleetHealth,
        generators: dict[str, Any],
        *,
        door_open: Callable[[], bool],
        on_died: Callable[[str, TitanError], None],
        on_interrupted: Callable[[], None],
    ) -> None:
        """
        Args:
            generators: name → handle of rank 0 of that generator.
            door_open: whether requests come in.
            on_died: a generator answers nobody any more, and why; is to call `lose`.
            on_interrupted: requests wait for another attempt; who serves may have changed.
        """
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._handles = generators
        self._door_open = door_open
        self._on_died = on_died
        self._on_interrupted = on_interrupted
        self.desk = ReplyDesk(note_seconds=NOTE_SECONDS)
        self._clients: dict[str, RequestClient] = {}
        self._at_door: dict[str, GenerationRequest] = {}  # by id, in order of arrival
        self._idle = {name: asyncio.Event() for name in generators}
        for idle in self._idle.values():
            idle.set()
        self.served = dict.fromkeys(generators, 0)
        """Completions given to callers whose last part came from that generator."""
        self.failed = dict.fromkeys(generators, 0)
        """Attempts on that generator that ended in an error."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed: TitanError | None = None

    def take(self, requests: Sequence[GenerationRequest], reply: Reply) -> None:
        """A message of requests."""
        accepted = self.desk.open(requests, reply)
        if self._closed is not None:
            self.desk.answer([], [(request.request_id, self._closed) for request in accepted])
            return
        entering: list[GenerationRequest] = []
        refused: list[tuple[str, TitanError]] = []
        door_open = self._door_open()
        for request in accepted:
            refusal = self._refusal(request)
            if refusal is not None:
                refused.append((request.request_id, refusal))
            elif door_open or request.pinned_to is not None:  # what is pinned does not wait for the others' weights
                entering.append(request)
            else:
                self._at_door[request.request_id] = request
        self.desk.answer([], refused)
        self._enter(entering)

    def give_up(self, request_ids: Sequence[str]) -> None:
        """Callers do not want these any more; each is answered with the tokens it has."""
        attempts: dict[str, list[str]] = {}
        final: list[Completion] = []
        for request_id in request_ids:
            outcome = self._dispatcher.abort(request_id)
            if isinstance(outcome, Assignment):
                attempts.setdefault(outcome.generator, []).append(outcome.request.request_id)
            elif isinstance(outcome, Completion):
                final.append(outcome)
            elif self._at_door.pop(request_id, None) is not None:
                final.append(nothing_sampled(request_id))
        for name, attempt_ids in attempts.items():
            self._client(name).abort(attempt_ids)
        self.desk.answer(final)

    def reconsider(self) -> None:
        """After anything that changed who may serve."""
        if self._door_open():
            entering, self._at_door = list(self._at_door.values()), {}
            self._enter(entering)
        self._send(self._dispatcher.reconsider(self._now()))
        self._fail_what_nobody_serves()

    def lose(self, name: str, error: TitanError) -> None:
        """The generator is gone: whatever it runs goes on elsewhere."""
        if name in self._clients:
            self._clients[name].fail(error)

    async def drained(self, name: str, seconds: float) -> None:
        """Wait until the generator is idle; what it still runs after `seconds` is interrupted and goes on elsewhere."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle[name].wait()
        except TimeoutError:
            stragglers = self._dispatcher.live_on(name)
            _log.info("%s did not drain in %g s: %d go on elsewhere", name, seconds, len(stragglers))
            self._client(name).abort(stragglers)
            await self._idle[name].wait()

    def fail(self, error: TitanError) -> None:
        """Whatever is open fails."""
        self._at_door.clear()
        self.desk.answer([], [(request_id, error) for request_id in self.desk.live()])

    def close(self, error: TitanError) -> None:
        """Whatever is open or comes later fails."""
        self._closed = error
        self.desk.close(error)
        if self._timer is not None:
            self._timer.cancel()

    async def leave(self) -> None:
        """After `close`: generators stop working on what is open."""
        for client in list(self._clients.values()):
            await client.close()

    def _refusal(self, request: GenerationRequest) -> RequestError | None:
        try:
            return self._dispatcher.refusal(request)
        except Exception as why:  # a malformed request: nobody else's business
            return RequestError(f"request {request.request_id!r}: {type(why).__name__}: {why}")

    def _enter(self, requests: list[GenerationRequest]) -> None:
        self._send(self._dispatcher.submit(requests, self._now()))
        self._fail_what_nobody_serves()

    def _send(self, assignments: list[Assignment]) -> None:
        by_target: dict[tuple[str, bytes | None], list[GenerationRequest]] = {}
        for assignment in assignments:
            # A first attempt carries its caller's id, so its completion is the whole answer and can go straight to
            # the caller; a later one has an id of its own and comes back here to be stitched.
            caller = self.desk.address(assignment.request.request_id)
            by_target.setdefault((assignment.generator, caller), []).append(assignment.request)
        for (name, caller), requests in by_target.items():
            self._idle[name].clear()
            self._client(name).send(requests, caller)
        self._set_timer()

    def _client(self, name: str) -> RequestClient:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = RequestClient(
                self._handles[name],
                name=name,
                on_answers=lambda completions, failures: self._on_answers(name, completions, failures),
                on_delivered=lambda request_ids: self._on_delivered(name, request_ids),
                on_pieces=self._on_pieces,
            )
        return client

    def _on_pieces(self, pieces: list[Piece]) -> None:
        self.desk.hand_out([shown for piece in pieces if (shown := self._dispatcher.shown(piece)) is not None])

    def _on_delivered(self, name: str, request_ids: list[str]) -> None:
        """The generator has answered these to their callers."""
        for request_id in request_ids:
            self._dispatcher.delivered(request_id)
        self.served[name] += len(request_ids)
        self.desk.delivered(request_ids)
        if not self._dispatcher.in_flight(name):
            self._idle[name].set()

    def _on_answers(self, name: str, completions: list[Completion], failures: list[tuple[str, TitanError]]) -> None:
        now = self._now()
        answers: list[Completion] = []
        errors: list[tuple[str, TitanError]] = []
        interrupted = False
        fatal: TitanError | None = None
        for completion in completions:
            whole = self._dispatcher.completed(completion.request_id, completion, now)
            if whole is not None:
                self.served[name] += whole.request_id in self.desk  # else its time was over, and its caller knows
                answers.append(whole)
            elif completion.finish_reason is FinishReason.ABORT:
                interrupted = True
        for attempt_id, error in failures:
            self.failed[name] += 1
            if isinstance(error, RequestError):
                request_id = self._dispatcher.failed(attempt_id)
                if request_id is not None:
                    errors.append((request_id, error))
                continue
            interrupted = True
            died = is_fatal(error)
            fatal = error if died and fatal is None else fatal
            rest = self._dispatcher.lost(attempt_id, now, died=str(error) if died else "")
            if rest is not None:
                answers.append(rest)
        self.desk.answer(answers, errors + self._dispatcher.failures())
        if not self._dispatcher.in_flight(name):
            self._idle[name].set()
        if fatal is not None:
            self._on_died(name, fatal)
        if interrupted:
            self._on_interrupted()

    def _fail_what_nobody_serves(self) -> None:
        failures = self._dispatcher.failures()
        if self._fleet.all_dead:
            reasons = "; ".join(f"{health.name}: {health.reason}" for health in self._fleet)
            error = GeneratorFailed(f"every generator is dead ({reasons})")
            failures += [(request_id, error) for request_id in self._dispatcher.drop_waiting()]
        if failures:
            self.desk.answer([], failures)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._dispatcher.wake_at) is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for overdue in self._dispatcher.overdue(self._now()):
            self._client(overdue.generator).abort([overdue.request.request_id])
        self._send(self._dispatcher.reconsider(self._now()))
        self._fail_what_nobody_serves()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
