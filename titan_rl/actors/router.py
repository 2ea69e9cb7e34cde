"""`GeneratorRouter`: the one actor in front of all generators.

A thin shell: `Dispatcher` decides which generator serves which request, `Fleet` decides which generator takes new
weights when, and this class makes the calls and waits. Every accepted request is answered once: whole, stitched from
several attempts, interrupted, or failed with the cause. Every change of who may serve ends with a call of `_advance`.

Is woken by messages, the end of a pull, and a timer where the dispatcher asks for one. If a generator dies or goes
stale, its requests continue on another one from the tokens they have. If several generators die under one request, only
that request fails. When all are dead, requests fail with the reasons. Slowness never means that a generator is dead. A
request that runs out of time is stopped and fails. Nobody waits for a late pull; its generator serves again once the
pull succeeds.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_rl.actors.connection import served
from titan_rl.actors.generator import Generator
from titan_rl.actors.requests import RequestClient, RequestServer, is_gone
from titan_rl.errors import ActorFailed, CallTimeout, GeneratorFailed, RequestError, TitanError, WeightsError
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Assignment, Dispatcher
from titan_rl.routing.fleet import Fleet
from titan_rl.routing.generator import GeneratorState, GeneratorStatus
from titan_rl.routing.strategies import build_strategy
from titan_rl.types import Completion, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import FleetPull, Publication, PullReport
from titan_rl.wire import Packed

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Generator:
    """A generator as the router deals with it. Who may serve is the fleet's business."""

    client: RequestClient
    served: int = 0
    failed: int = 0
    outcome: PullReport | TitanError | None = None  # of its last pull


class GeneratorRouter(RequestServer):
    """Endpoints: `generate_many`, `abort`, `end_sessions`, `pull_model_state_dict`, `serve_beside`, `retire`, `sleep`,
    `wake_up`, `pin`, `unpin`, `fleet_status`, `generator_lost`, `close`."""

    def __init__(self, config: RouterConfig, generators: dict[str, Any]) -> None:
        """
        Args:
            generators: name → handle of rank 0 of that generator.
        """
        super().__init__()
        self._config = config
        self._strategy = build_strategy(config)
        self._dispatcher = Dispatcher(
            self._strategy, resume=config.resume, seconds=config.request_seconds, retries=config.request_retries
        )
        self._fleet = Fleet(
            self._strategy, mode=config.weight_sync, max_syncing=config.max_syncing, retries=config.pull_retries
        )
        self._generators: dict[str, _Generator] = {}
        for name, rank0 in generators.items():
            on_answers = functools.partial(self._or_end, self._on_answers, name)
            client = RequestClient(rank0, name=name, on_answers=on_answers, on_pieces=self._on_pieces)
            self._fleet.add(name)
            self._generators[name] = _Generator(client)
        self._timer: asyncio.TimerHandle | None = None
        self._publications: dict[PolicyVersion, Publication] = {}  # of the versions that are wanted
        self._changed = asyncio.Event()  # set at the next change of what `_until` may wait for
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: TitanError | None = None  # why the router accepts nothing any more

    # Requests.

    def take(self, requests: Sequence[GenerationRequest]) -> None:
        if self._ended is not None:
            self.answer([], [(request.request_id, self._ended) for request in requests])
        else:
            self._or_end(self._accept, requests)

    def _accept(self, requests: Sequence[GenerationRequest]) -> None:
        refusals = [(request, self._refusal(request)) for request in requests]
        self.answer([], [(request.request_id, error) for request, error in refusals if error is not None])
        self._send(self._dispatcher.submit([request for request, error in refusals if error is None], self._now()))

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

    def _refusal(self, request: GenerationRequest) -> RequestError | None:
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
        if self._fleet.all_dead:
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

    def _on_answers(self, name: str, completions: Packed[Completion], failures: list[tuple[str, TitanError]]) -> None:
        """Handle the answers of one message from a generator, or the failures after its death. A completion that needs
        no other attempt goes on as it is."""
        now = self._now()
        generator = self._generators[name]
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
        generator.served += self.answer(completions.select(whole))
        generator.served += self.answer(answers, errors + self._dispatcher.failures())
        if (fatal := next((error for _, error in failures if is_gone(error)), None)) is not None:
            self._died(name, fatal)
        if parts or failures:
            self._advance()  # requests may wait for another attempt
        else:
            self._tell()  # a drain may be waiting for the last request

    # Weights.

    @served
    async def pull_model_state_dict(self, publication: Publication) -> FleetPull:
        """Bring every generator to this publication or a newer one, each on its own schedule.

        Returns when no generator is still on its way. Overlapping calls all get the newest publication.

        Raises:
            WeightsError: the publication is older than one requested before.
        """
        version, fleet = publication.version, self._fleet
        fleet.ask(version)
        self._publications = {version: publication}
        self._advance()
        await self._until(lambda: fleet.settled(version))
        reports = {
            name: outcome
            for name, generator in self._generators.items()
            if isinstance(outcome := generator.outcome, PullReport)
            and outcome.version >= version
            and not fleet[name].is_out_of_service
        }
        failures = {each.name: each.reason or f"it is {each.state}" for each in fleet if each.name not in reports}
        return FleetPull(version=version, reports=reports, failures=failures)

    @served
    async def serve_beside(self, publication: Publication) -> None:
        """Let some generator serve exactly this version until `retire`, beside the versions that are served already.
        Returns when one does, or when the version is retired.

        Raises:
            WeightsError: no generator can; says why.
        """
        version, fleet = publication.version, self._fleet
        fleet.ask_beside(version)
        self._publications[version] = publication
        self._advance()
        await self._until(lambda: version not in fleet.wanted or fleet.is_served(version) or fleet.is_lost(version))
        if version in fleet.wanted and not fleet.is_served(version):
            raise WeightsError(f"{version} is served by nobody: {fleet.describe()}")

    @served
    async def retire(self, version: PolicyVersion) -> None:
        """No request will ask for exactly this version any more."""
        self._fleet.retire(version)
        kept = (*self._fleet.wanted, self._fleet.target)
        self._publications = {each: it for each, it in self._publications.items() if each in kept}
        self._advance()

    @served
    async def sleep(self, name: str) -> int:
        """Take a generator out of service until `wake_up`. Its requests continue elsewhere. Returns the bytes freed."""
        self._fleet.sleep(name)
        self._advance()
        return await self._generators[name].client.connection.call(None, Generator.sleep)

    @served
    async def wake_up(self, name: str) -> PullReport:
        """Bring a sleeping generator back, through a verified pull of the newest publication."""
        self._fleet.wake(name)
        return await self._back(name)

    @served
    async def pin(self, version: PolicyVersion) -> str:
        """Reserve a generator until `unpin`: it stays at exactly this version and serves only requests with its name in
        `pinned_to`. See `Fleet.pin`. Returns its name."""
        name = self._fleet.pin(version, self._dispatcher.load)
        self._dispatcher.pinned(name, version)
        self._advance()
        return name

    @served
    async def unpin(self, name: str) -> PullReport:
        """End a pin: the generator finishes its requests, pulls the newest publication and serves everybody again.
        Requests that still wait for it fail."""
        self._fleet.unpin(name)
        self._dispatcher.unpinned(name)
        return await self._back(name)

    async def _back(self, name: str) -> PullReport:
        """Wait until a returning generator serves the newest publication."""
        assert (newest := self._fleet.target) is not None
        self._generators[name].outcome = None
        self._advance()
        await self._until(lambda: self._fleet.settled(newest))
        outcome = self._generators[name].outcome
        if outcome is None:
            raise GeneratorFailed(f"{name} did not come back: {self._fleet[name].reason or self._fleet[name].state}")
        if isinstance(outcome, TitanError):
            raise outcome
        return outcome

    async def _sync(self, name: str) -> None:
        """Change the weights of one generator: drain it, pull, let it serve again."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        generator = self._generators[name]
        drain, pull = self._config.drain_seconds, self._config.pull_seconds
        # The drain counts too, because a stopped process never finishes it.
        late = loop.call_later(drain + pull, self._or_end, self._is_late, name)
        try:
            if self._fleet.must_drain(name):
                await self._drained(name, drain)
            late.cancel()
            late = loop.call_later(pull, self._or_end, self._is_late, name)
            publication = self._publications[self._fleet.pulling(name)]
            waited = loop.time() - started
            call = generator.client.connection.call
            if self._fleet[name].must_wake:
                report = await call(None, Generator.wake_up, publication)
            else:
                back = self._fleet.goes_back(name)
                report = await call(None, Generator.pull_model_state_dict, publication, go_back=back)
            self._fleet.verified(name, report.version)
            generator.outcome = replace(report, seconds_waited=waited + report.seconds_waited)
        except Exception as why:  # whatever fails here concerns this generator only
            error = why if isinstance(why, TitanError) else WeightsError(f"{type(why).__name__}: {why}")
            _log.warning("%s did not take new weights: %s", name, error, exc_info=None if error is why else why)
            generator.outcome = error
            if is_gone(error):
                self._died(name, error)
            else:
                self._fleet.failed(name, str(error))
        finally:
            late.cancel()
        self._advance()

    async def _drained(self, name: str, seconds: float) -> None:
        """Wait until the generator is idle. Requests that still run after `seconds` are moved to other generators."""
        try:
            async with asyncio.timeout(seconds):
                await self._until(lambda: not self._dispatcher.in_flight(name))
        except TimeoutError:
            stragglers = self._dispatcher.live_on(name)
            _log.info("%s did not drain in %g s: %d go on elsewhere", name, seconds, len(stragglers))
            self._generators[name].client.abort(stragglers)
            await self._until(lambda: not self._dispatcher.in_flight(name))

    def _is_late(self, name: str) -> None:
        limit = f"router.pull_seconds ({self._config.pull_seconds:g})"
        error = CallTimeout(f"{name} takes new weights for longer than {limit}; it serves nothing until it has them")
        _log.warning("%s", error)
        self._generators[name].outcome = error
        self._fleet.late(name, str(error))
        self._advance()

    # The fleet.

    @served
    async def fleet_status(self) -> list[GeneratorStatus]:
        """Every generator as the router sees it."""
        load, in_flight = self._dispatcher.load, self._dispatcher.in_flight
        return [
            self._fleet[name].status(load(name), in_flight(name), generator.served, generator.failed)
            for name, generator in self._generators.items()
        ]

    @served
    async def generator_lost(self, name: str, reason: str) -> None:
        """Mark a generator as dead: the kernel told the controller that one of its processes ended. Its requests
        continue elsewhere at once. Without this, a call to the dead process may notice late or never."""
        self._died(name, GeneratorFailed(reason))

    @served
    async def close(self) -> None:
        """Send nothing more. Open requests fail, and the generators stop them."""
        self._end(GeneratorFailed("the router was closed"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for generator in self._generators.values():
            await generator.client.disconnect()

    def _died(self, name: str, error: TitanError) -> None:
        """A generator is dead, whoever noticed it. Its requests continue elsewhere, and nobody waits for its pull. Only
        the first report counts."""
        if self._fleet[name].state is GeneratorState.DEAD:
            return
        self._fleet.died(name, str(error))
        self._dispatcher.unpinned(name)
        self._generators[name].client.fail(error)
        self._advance()

    def _advance(self) -> None:
        """Call this after every change of who may serve. It first assigns waiting requests, so that a generator that
        was just verified serves them however fast versions follow each other; then it starts the syncs that can
        begin."""
        if self._ended is not None:
            return
        self._send(self._dispatcher.reconsider(self._now()))
        for name in self._fleet.startable(self._dispatcher.load):
            task = asyncio.get_running_loop().create_task(self._sync(name))
            self._tasks.add(task)
            task.add_done_callback(self._finished)
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

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._or_end(task.result)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
