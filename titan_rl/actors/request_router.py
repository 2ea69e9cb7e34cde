"""What becomes of requests at the router: `Dispatcher` decides which generator serves which, and this class sends them.

Every accepted request is answered once: whole, stitched from several attempts, interrupted, or failed with the cause.
Every change of who may serve ends with a call of `_advance`.

If a generator dies or goes stale, its requests continue on another one from the tokens they have. If several generators
die under one request, only that request fails. A generator that joins takes the place of a dead one of its name;
nothing that the dead one still says reaches it. When all are dead, requests wait for a replacement, and fail with the
reasons once none is to come. A request that runs out of time is stopped and fails.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl.actors.connection import served
from titan_rl.actors.requests import RequestClient, RequestServer, is_gone
from titan_rl.errors import ActorFailed, GeneratorFailed, RequestError, TitanError
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Assignment, Dispatcher
from titan_rl.routing.fleet import Fleet
from titan_rl.routing.generator import GeneratorState
from titan_rl.routing.strategies import build_strategy
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece
from titan_rl.weights.manifest import PullReport
from titan_rl.wire import Packed

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RoutedGenerator:
    """A generator as the router deals with it. Its state is the fleet's business. Its replacement is another one."""

    name: str
    client: RequestClient = field(init=False)
    served: int = 0
    failed: int = 0
    aborted: int = 0
    aborted_tokens: int = 0
    outcome: PullReport | TitanError | None = None  # of its last pull
    sync: asyncio.Task[None] | None = None  # the last one


class RequestRouter(RequestServer):
    """Endpoints: `generate_many`, `abort`, `end_sessions`, `client_lost`."""

    def __init__(
        self,
        config: RouterConfig,
        generators: dict[str, Any],
        serving: int | None = None,
        awaited: Collection[str] = (),
        others: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            generators: name → handle of rank 0 of that generator. They may have served another router before.
            serving: generators in service; the others are spares. None: all are.
            awaited: names of further ones that are being replaced and will join.
            others: generators of another kind than the spares, always in service → what they can run at once, relative
                to the rest.
        """
        super().__init__()
        self._config = config
        self._strategy = build_strategy(config)
        self._dispatcher = Dispatcher(
            self._strategy,
            resume=config.resume,
            seconds=config.request_seconds,
            retries=config.request_retries,
            capacity=others,
        )
        self._fleet = Fleet(
            self._strategy,
            mode=config.weight_sync,
            max_syncing=config.max_syncing,
            retries=config.pull_retries,
            serving=serving,
            others=(others or {}).keys(),
        )
        self._generators: dict[str, RoutedGenerator] = {}
        for name, rank0 in generators.items():
            self._join(name, rank0)
        for name in awaited:
            self._fleet.awaited(name)
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()  # set at the next change of what `_until` may wait for
        self._ended: TitanError | None = None  # why the router accepts nothing any more

    def take(self, requests: Sequence[GenerationRequest]) -> None:
        if self._ended is not None:
            self.answer([], [(request.request_id, self._ended) for request in requests])
        else:
            self._or_end(self._accept, requests)

    def _accept(self, requests: Sequence[GenerationRequest]) -> None:
        refusals = [(request, self._refusal(request)) for request in requests]
        self.answer([], [(request.request_id, error) for request, error in refusals if error is not None])
        self._send(self._dispatcher.submit([request for request, error in refusals if error is None], self._now()))
        if self._dispatcher.waiting and any(request.exact_version is not None for request in requests):
            self._advance()  # a generator that has nothing to do may serve their version

    def give_up(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            outcome = self._dispatcher.abort(request_id)
            if isinstance(outcome, Assignment):
                self._stop([outcome])
            elif outcome is not None:
                self.answer([outcome])

    @served
    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """These conversations are over: a sticky strategy may forget them."""
        for session_id in session_ids:
            self._strategy.end_session(session_id)

    def _refusal(self, request: GenerationRequest) -> TitanError | None:
        try:
            return self._dispatcher.refusal(request)
        except Exception as why:  # a malformed request must not fail the others
            return RequestError(f"request {request.request_id!r}: {type(why).__name__}: {why}")

    def _send(self, assignments: list[Assignment]) -> None:
        for each in assignments:
            self._generators[each.generator].client.send((each.request,))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._dispatcher.wake_at) is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._or_end, self._on_timer)
        failures = self._dispatcher.failures()
        if self._fleet.is_given_up:
            error = GeneratorFailed(f"every generator is dead ({self._fleet.describe()})")
            failures += [(request_id, error) for request_id in self._dispatcher.drop_waiting()]
        self.answer([], failures)

    def _stop(self, assignments: list[Assignment]) -> None:
        for each in assignments:
            self._generators[each.generator].client.abort([each.request.request_id])

    def _on_timer(self) -> None:
        self._timer = None
        self._stop(self._dispatcher.overdue(self._now()))
        self._send(self._dispatcher.reconsider(self._now()))

    def _on_pieces(self, pieces: list[Piece]) -> None:
        self.hand_out([shown for piece in pieces if (shown := self._dispatcher.shown(piece)) is not None])

    def _on_answers(
        self, generator: RoutedGenerator, completions: Packed[Completion], failures: list[tuple[str, TitanError]]
    ) -> None:
        """Handle the answers of one message from a generator, or the failures after its death. A completion that needs
        no other attempt goes on as it is."""
        now = self._now()
        whole: list[int] = []
        parts: list[int] = []
        ends = zip(completions.request_ids, completions.column("finish_reason"), strict=True)
        for place, (attempt_id, reason) in enumerate(ends):
            (whole if self._dispatcher.ended_whole(attempt_id, reason) else parts).append(place)
        answers: list[Completion] = []
        errors: list[tuple[str, TitanError]] = []
        for part in completions.select(parts).unpack():
            if (answer := self._dispatcher.completed(part.request_id, part, now)) is not None:
                answers.append(answer)
        for attempt_id, error in failures:
            generator.failed += 1
            if isinstance(error, RequestError):
                if (request_id := self._dispatcher.ended(attempt_id)) is not None:
                    errors.append((request_id, error))
                continue
            died = str(error) if is_gone(error) else ""
            if (rest := self._dispatcher.lost(attempt_id, now, died=died)) is not None:
                answers.append(rest)
        aborted = [len(each.token_ids) for each in answers if each.finish_reason is FinishReason.ABORT]
        generator.aborted += len(aborted)
        generator.aborted_tokens += sum(aborted)
        generator.served += self.answer(completions.select(whole))
        generator.served += self.answer(answers, errors + self._dispatcher.failures())
        if (fatal := next((error for _, error in failures if is_gone(error)), None)) is not None:
            self._died(generator, fatal)
        if parts or failures or (self._dispatcher.waiting and not self._dispatcher.in_flight(generator.name)):
            self._advance()  # requests may wait for another attempt, or for a version that an idle generator may serve
        else:
            self._tell()  # a drain may be waiting for the last request

    # Generators.

    def _join(self, name: str, rank0: Any) -> None:
        self._fleet.joined(name)
        generator = self._generators[name] = RoutedGenerator(name)
        on_answers = functools.partial(self._or_end, self._on_answers, generator)
        generator.client = RequestClient(rank0, name=name, on_answers=on_answers, on_pieces=self._on_pieces)

    def _died(self, generator: RoutedGenerator, error: TitanError) -> None:
        """A generator is dead, whoever noticed it. Its requests continue elsewhere, and nobody waits for its pull. Only
        the first report counts; one that comes after its replacement does not concern that."""
        name = generator.name
        if self._generators[name] is not generator or self._fleet[name].state is GeneratorState.DEAD:
            return
        self._fleet.died(name, str(error))
        self._dispatcher.unpinned(name)
        if generator.sync is not None:
            generator.sync.cancel()
        generator.client.fail(error)
        self._advance()

    def _advance(self) -> None:
        """Call this after every change of who may serve, to assign the requests that wait for it."""
        if self._ended is None:
            self._send(self._dispatcher.reconsider(self._now()))
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()
            if self._ended is not None:
                raise self._ended

    def _end(self, error: TitanError) -> None:
        """Fail open requests now and later ones as they come."""
        self._ended = error
        if self._timer is not None:
            self._timer.cancel()
        self.answer([], [(request_id, error) for request_id in self.live()])
        self._tell()

    def _or_end(self, work: Callable[..., None], *args: Any) -> None:
        """If this work fails, its bookkeeping stops in the middle and requests might wait for ever: the router ends."""
        try:
            work(*args)
        except Exception as error:
            _log.exception("the router itself failed")
            self._end(ActorFailed(f"router: {type(error).__name__}: {error}"))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
