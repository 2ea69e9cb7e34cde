"""`GeneratorRouter`: the one actor in front of all generators.

A thin shell: `Dispatcher` decides which generator serves what, `Fleet` who is there, `WeightSync` changes the weights.

- Every accepted request is answered once: whole, stitched from several attempts, interrupted, or failed with the cause.
  If a generator dies or goes stale, its requests continue on another one from the tokens they have. When all are dead,
  they wait for a replacement, and fail with the reasons once none is to come.
- A generator that joins takes the place of a dead one of its name; nothing that the dead one still says reaches it.
- Every change of who may serve ends with a call of `advance`.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from titan_rl.actors.generator import Generator
from titan_rl.actors.weight_sync import RoutedGenerator, WeightSync
from titan_rl.errors import ActorFailed, ActorGone, GeneratorFailed, RequestError, TitanError
from titan_rl.metrics.timeline import timeline
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Assignment, Dispatcher
from titan_rl.routing.health import GONE, Fleet, GeneratorStatus
from titan_rl.routing.strategies import build_strategy
from titan_rl.rpc.connection import endpoint
from titan_rl.rpc.requests import Failures, Packed, RequestServer, is_gone
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import FleetPull, Publication

_log = logging.getLogger(__name__)


class GeneratorRouter(RequestServer):
    """`RouterClient` documents the endpoints that it has calls for."""

    def __init__(
        self,
        config: RouterConfig,
        generators: dict[str, Any],
        serving: int | None = None,
        awaited: Collection[str] = (),
    ) -> None:
        """`generators`: rank 0 of each, by name; they may have served another router before. `serving`: so many are in
        service, and the others are spares; None: all. `awaited`: names of further ones that will join."""
        super().__init__()
        self.config = config
        self._strategy = build_strategy(config)
        self.fleet = Fleet(self._strategy, serving=serving)
        self.dispatcher = Dispatcher(self._strategy, self.fleet, config)
        self.generators: dict[str, RoutedGenerator] = {}
        self._sync = WeightSync(self)
        for name, rank0 in generators.items():
            self._join(name, rank0)
        for name in awaited:
            self.fleet.expect(name)
        self._changed = asyncio.Event()  # set at the next change of what `until` may wait for
        self._ended: TitanError | None = None  # why the router accepts nothing any more

    # Requests.

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._ended is not None:
            self.answer([], [(request.request_id, self._ended) for request in requests])
        else:
            self.run(self._accept, requests)

    def stop_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.run(self._stop, request_id)

    def _stop(self, request_id: str) -> None:
        outcome = self.dispatcher.abort(request_id)
        if isinstance(outcome, Assignment):
            self.generators[outcome.generator].abort([outcome.request.request_id])
        elif outcome is not None:
            self.answer([outcome])

    def _accept(self, requests: Sequence[GenerationRequest]) -> None:
        self._send(self.dispatcher.submit(requests))
        if self.dispatcher.waiting and len(self._sync.plan.wanted) > 1:
            self.advance()  # a generator that has nothing to do may serve another one

    def _send(self, assignments: list[Assignment]) -> None:
        to: dict[str, list[GenerationRequest]] = {}
        for generator, attempt in assignments:
            to.setdefault(generator, []).append(attempt)
        for generator, attempts in to.items():
            self.generators[generator].send(attempts)
        failures = self.dispatcher.failures()
        if self.fleet.is_given_up:
            error = GeneratorFailed(f"every generator is dead ({self.fleet.describe()})")
            failures += [(request_id, error) for request_id in self.dispatcher.drop_waiting()]
        self.answer([], failures)

    def show(self, pieces: list[Piece]) -> None:
        """Hand pieces from a generator on to their callers."""
        self.send_pieces([shown for piece in pieces if (shown := self.dispatcher.shown(piece)) is not None])

    def route(self, generator: RoutedGenerator, completions: Packed[Completion], failures: Failures) -> None:
        """Route a generator's answers, or failures after its death. What needs no other attempt goes on as it is."""
        status = generator.status
        whole: list[int] = []
        parts: list[int] = []
        ends = zip(completions.request_ids, completions.column("finish_reason"), strict=True)
        for place, (attempt_id, reason) in enumerate(ends):
            (whole if self.dispatcher.ended_whole(attempt_id, reason) else parts).append(place)
        ended = completions.select(parts).unpack() if parts else ()
        wholes = (self.dispatcher.completed(part.request_id, part) for part in ended)
        answers = [answer for answer in wholes if answer is not None]
        errors: list[tuple[str, TitanError]] = []
        for attempt_id, error in failures:
            if isinstance(error, RequestError):  # the client's fault
                if (request_id := self.dispatcher.ended(attempt_id)) is not None:
                    errors.append((request_id, error))
                continue
            status.failed += 1
            died = str(error) if is_gone(error) else ""
            if (rest := self.dispatcher.lost(attempt_id, died=died)) is not None:
                answers.append(rest)
        aborted = [len(each.token_ids) for each in answers if each.finish_reason is FinishReason.ABORT]
        status.aborted += len(aborted)
        status.aborted_tokens += sum(aborted)
        status.served += self.answer(completions.select(whole))
        status.served += self.answer(answers, errors + self.dispatcher.failures())
        if (fatal := next((error for _, error in failures if is_gone(error)), None)) is not None:
            self.died(generator, fatal)
        idle = not self.dispatcher.in_flight(generator.name)
        if idle:
            generator.idle.set()  # its drain waits for that
        if parts or failures or (idle and self.dispatcher.waiting):
            self.advance()  # requests may wait for another attempt, or for a version that an idle generator may serve

    # Weights.

    @endpoint
    async def setup(self, wanted: Sequence[Publication] = ()) -> int:
        """Wants what a router before this one was asked for, and does not wait until it is served."""
        timeline.follow(lambda: "generators" if self._clients else "rollouts")
        self._sync.want(wanted, served=True)
        self.advance()
        return os.getpid()

    @endpoint
    async def pull_model_state_dict(self, wanted: Sequence[Publication], version: PolicyVersion) -> FleetPull:
        """Returns also when nobody will serve `version`."""
        self._sync.want(wanted)
        self.advance()
        await self.until(lambda: self._sync.plan.settled(version))
        return self._sync.report(version)

    @endpoint
    async def until_unavailable(self) -> str:
        await self.until(lambda: self._sync.plan.unavailable is not None)
        return f"{self._sync.plan.unavailable} is served by nobody any more: {self.fleet.describe()}"

    @endpoint
    async def sleep(self, name: str) -> int:
        """Take a generator out of service; its requests continue elsewhere. Returns the bytes it freed."""
        self.fleet[name].sleep()
        self.advance()
        try:
            return await self.generators[name].connection.call(None, Generator.sleep)
        except ActorGone as error:  # which a caller would take for the end of this router
            raise GeneratorFailed(f"{name} did not fall asleep: {error}") from error

    @endpoint
    async def wake_up(self, name: str) -> PolicyVersion:
        """Bring it back with the newest weights, which are verified."""
        return await self._sync.wake_up(name)

    # Generators.

    @endpoint
    async def fleet_status(self) -> list[GeneratorStatus]:
        return [self._status(generator) for generator in self.generators.values()]

    @endpoint
    async def generator_joined(self, name: str, rank0: Any) -> None:
        """A generator is set up, maybe in the place of a dead one of its name. It will pull, be verified, and serve."""
        self._lost(name, "it was replaced")
        self._join(name, rank0)
        self.advance()

    @endpoint
    async def generator_lost(self, name: str, reason: str) -> None:
        """One of its processes has ended. Its requests continue elsewhere at once; without this, a call to the dead
        process may notice late or never. It may be unknown: dead before this router was there."""
        self._lost(name, reason)

    @endpoint
    async def generator_left_out(self, name: str, reason: str) -> None:
        """A dead generator will not be replaced. When all are left out, requests fail."""
        self._lost(name, reason)
        self.fleet.give_up(name, reason)
        self.advance()

    @endpoint
    async def resize(self, serving: int) -> None:
        """So many generators are to be in service from now on; the others are spares."""
        self.fleet.resize(serving)
        self.advance()

    @endpoint
    async def serve(self) -> None:
        try:
            await self.until(lambda: False)
        except ActorGone as error:  # a caller would take that for the end of the process, which lives
            raise ActorFailed(str(error)) from error
        except GeneratorFailed:
            return

    @endpoint
    async def close(self) -> None:
        """Send nothing more. Open requests fail, and the generators stop them."""
        self._end(GeneratorFailed("the router was closed"))
        await self._sync.stop()
        for generator in self.generators.values():
            await generator.disconnect()

    def _status(self, generator: RoutedGenerator) -> GeneratorStatus:
        status, health = generator.status, self.fleet[generator.name]
        status.state, status.last_error = health.phase, health.reason
        status.version = "none" if health.version is None else str(health.version)
        status.load = self.dispatcher.load(generator.name)
        status.in_flight = self.dispatcher.in_flight(generator.name)
        return status

    def _join(self, name: str, rank0: Any) -> None:
        self.fleet.join(name)
        self.generators[name] = RoutedGenerator(name, rank0, self)

    def _lost(self, name: str, reason: str) -> None:
        if name in self.generators:
            self.died(self.generators[name], GeneratorFailed(reason))

    def died(self, generator: RoutedGenerator, error: TitanError) -> None:
        """A generator is dead, whoever noticed it. Its requests continue elsewhere, and nobody waits for its pull. Only
        the first report counts; one that comes after its replacement does not concern that."""
        name = generator.name
        if self.generators[name] is not generator or self.fleet[name].phase in GONE:
            return
        self.fleet.died(name, str(error))
        if generator.sync is not None:
            generator.sync.cancel()
        generator.lose(str(error))
        self.advance()

    # What happens next.

    def advance(self) -> None:
        """Assign the requests that wait, then begin the changes of weights that can begin. In this order, so that a
        generator that was just verified serves those that wait however fast versions follow each other."""
        if self._ended is not None:
            return
        self._send(self.dispatcher.reconsider())
        self._notify()
        self._sync.begin()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until this holds. Raises the cause if the router ends first, or has ended: nothing changes any more."""
        while self._ended is None:
            if holds():
                return
            await self._changed.wait()
        raise self._ended

    def _end(self, error: TitanError) -> None:
        """Fail open requests now and later ones as they come."""
        self._ended = error
        self.fail_all(error)
        self._notify()

    def run(self, work: Callable[..., None], *args: Any) -> None:
        """If this work fails, its bookkeeping stops in the middle and requests might wait for ever: the router ends.
        Its clients are told that it is gone, so that they ask the one that replaces it."""
        try:
            work(*args)
        except Exception as error:
            _log.exception("the router itself failed")
            self._end(ActorGone(f"router: {type(error).__name__}: {error}"))
