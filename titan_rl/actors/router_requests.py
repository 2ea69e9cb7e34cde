"""The router's requests: from its callers to the generators and back, over as many attempts as it takes.

Every request that was taken in is answered once: by a generator to its caller straight away, or from here, stitched,
interrupted or failed with the cause. Who serves what is the `Dispatcher`'s decision; this class moves messages and
waits. Two kinds of events: one per generator, set while it is idle (a drain waits for it), and the door, open while
anybody serves (requests wait for it).

Pieces of completions that stream pass through here, unlike the completions themselves: what a caller was shown is what
another attempt must go on from when the generator is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from titan_rl.actors.calls import is_fatal
from titan_rl.actors.reply_desk import Reply, ReplyDesk
from titan_rl.actors.transport import RequestClient
from titan_rl.errors import GeneratorFailed, RequestError, TitanError
from titan_rl.routing.dispatcher import Assignment, Dispatcher, nothing_sampled
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
        request_seconds: float,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_died: Callable[[str, TitanError], None],
        on_interrupted: Callable[[], None],
    ) -> None:
        """
        Args:
            generators: name → handle of rank 0 of that generator.
            request_seconds: bound on one message of requests to a generator.
            spawn: runs a task that is watched.
            on_died: a generator answers nobody any more, and why.
            on_interrupted: requests wait for another attempt; who serves may have changed.
        """
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._handles = generators
        self._request_seconds = request_seconds
        self._spawn = spawn
        self._on_died = on_died
        self._on_interrupted = on_interrupted
        self.desk = ReplyDesk(note_seconds=NOTE_SECONDS)
        self._clients: dict[str, RequestClient] = {}
        self._door = asyncio.Event()
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
        refused = [(r.request_id, error) for r in accepted if (error := self._dispatcher.refusal(r)) is not None]
        self.desk.answer([], refused)
        if self._door.is_set():
            self._enter(accepted)
            return
        # What is pinned does not wait for the others' weights.
        self._enter([request for request in accepted if request.pinned_to is not None])
        self._spawn(self._enter_when_open([request for request in accepted if request.pinned_to is None]))

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
            elif request_id in self.desk:  # it still waits at the door
                final.append(nothing_sampled(request_id))
        for name, attempt_ids in attempts.items():
            self._client(name).abort(attempt_ids)
        self.desk.answer(final)

    def reconsider(self, *, door_open: bool) -> None:
        """After anything that changed who may serve.

        Args:
            door_open: whether requests come in; those at a closed door wait.
        """
        if door_open:
            self._door.set()
        else:
            self._door.clear()
        self._send(self._dispatcher.reconsider(self._now()))
        self._fail_what_nobody_serves()

    async def drained(self, name: str, seconds: float) -> None:
        """Wait until the generator is idle; what it still runs after `seconds` is interrupted and goes on elsewhere."""
        try:
            await asyncio.wait_for(self._idle[name].wait(), seconds)
        except TimeoutError:
            stragglers = self._dispatcher.live_on(name)
            _log.info("%s did not drain in %g s: %d go on elsewhere", name, seconds, len(stragglers))
            self._client(name).abort(stragglers)
            await self._idle[name].wait()

    def lose(self, name: str, error: TitanError) -> None:
        """The generator is gone: whatever it runs goes on elsewhere."""
        if name in self._clients:
            self._clients[name].fail(error)

    def fail(self, error: TitanError) -> None:
        """Whatever is open fails."""
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

    async def _enter_when_open(self, requests: list[GenerationRequest]) -> None:
        await self._door.wait()
        self._enter(requests)

    def _enter(self, requests: list[GenerationRequest]) -> None:
        entering = [request for request in requests if request.request_id in self.desk]
        self._send(self._dispatcher.submit(entering, self._now()))
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
                seconds=self._request_seconds,
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
        for completion in completions:
            whole = self._dispatcher.completed(completion.request_id, completion, now)
            if whole is not None:
                self.served[name] += 1
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
            rest = self._dispatcher.lost(attempt_id, now)
            if rest is not None:
                answers.append(rest)
            if is_fatal(error):
                self._on_died(name, error)
        self.desk.answer(answers, errors)
        if not self._dispatcher.in_flight(name):
            self._idle[name].set()
        if interrupted:
            self._on_interrupted()

    def _fail_what_nobody_serves(self) -> None:
        failures = [
            (request_id, GeneratorFailed(f"request {request_id}: the generator that it was pinned to is not any more"))
            for request_id in self._dispatcher.orphans()
        ]
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
        self._send(self._dispatcher.reconsider(self._now()))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
