"""`GeneratorRouter`: one door in front of all generators.

A thin shell: `Dispatcher` decides who serves what, `ServingGate` who takes new weights when; `RouterRequests` and
`RouterPulls` make the calls and wait. Whatever changes who may serve ends in `_advance`, where the two meet.

Consumes: requests, aborts, pulls, from any actor; answers of generators.
Is woken by: messages, the end of a pull, and a timer where the dispatcher asks for one.
Produces: one answer per request on its reply port; one `FleetPull` per pull.
On failure: a generator that dies or goes stale costs its requests another attempt elsewhere, from the tokens they
have, and one under which generators die again and again fails alone. When every generator is dead, requests fail at
once with the reasons. Time says nothing about a generator: a request whose time is over is stopped and fails, and a
late pull is waited for by nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from titan_rl.actors.calls import served
from titan_rl.actors.connection import ConnectedActor
from titan_rl.actors.router_pulls import RouterPulls
from titan_rl.actors.router_reports import FleetPull, GeneratorStatus
from titan_rl.actors.router_requests import RouterRequests
from titan_rl.errors import ActorFailed, GeneratorFailed, TitanError
from titan_rl.generation.reports import PullReport
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Dispatcher
from titan_rl.routing.fleet import FleetHealth, GeneratorState
from titan_rl.routing.gate import ServingGate
from titan_rl.routing.strategies import build_strategy
from titan_rl.types import Completion, GenerationRequest, PolicyVersion
from titan_rl.weights.manifest import Publication

_log = logging.getLogger(__name__)


class GeneratorRouter(ConnectedActor):
    """Endpoints: `generate_many`, `generate`, `abort`, `pull_model_state_dict`, `sleep`, `wake_up`, `pin`, `unpin`,
    `fleet_status`, `generator_lost`, `close`."""

    def __init__(self, config: RouterConfig, generators: dict[str, Any]) -> None:
        """
        Args:
            generators: name → handle of rank 0 of that generator.
        """
        self._strategy = build_strategy(config)
        self._dispatcher = Dispatcher(
            self._strategy,
            resume=config.resume,
            seconds=config.request_seconds,
            retries=config.request_retries,
        )
        self._fleet = FleetHealth(self._strategy)
        self._gate = ServingGate(
            self._fleet, mode=config.weight_sync, max_syncing=config.max_syncing, retries=config.pull_retries
        )
        for name in generators:
            self._fleet.add(name)
        self._requests = RouterRequests(
            self._dispatcher,
            self._fleet,
            generators,
            door_open=lambda: self._gate.open,
            on_died=self._died,
            on_interrupted=self._advance,
        )
        self._pulls = RouterPulls(
            self._gate,
            self._fleet,
            generators,
            config,
            load=self._dispatcher.load,
            spawn=self._spawn,
            drained=self._requests.drained,
            on_died=self._died,
            on_change=self._advance,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @served
    async def generate_many(self, address: bytes, connection: int) -> None:
        """Serve one client's requests until it leaves; answers go to its reply port as they finish. See `transport`."""
        requests = self._requests
        await requests.desk.attend(address, connection, requests.take, requests.give_up, self._end_sessions)

    @served
    async def generate(self, request: GenerationRequest) -> Completion:
        """One request."""
        return await self._requests.desk.one(request, self._requests.take)

    @served
    async def abort(self, request_ids: list[str]) -> None:
        """Give up on these requests; each is answered with the tokens it has."""
        self._requests.give_up(request_ids)

    @served
    async def pull_model_state_dict(self, publication: Publication) -> FleetPull:
        """Bring every generator to this publication or a newer one, each on its own schedule.

        Returns when no generator is on its way any more; calls that overlap are served by the newest publication.

        Raises:
            WeightsError: older than what was asked for before.
        """
        return await self._pulls.pull(publication)

    @served
    async def sleep(self, name: str) -> int:
        """Take a generator out of service until `wake_up`; what it runs goes on elsewhere. Returns the bytes freed."""
        self._gate.sleep(name)
        self._advance()
        return await self._pulls.sleep(name)

    @served
    async def wake_up(self, name: str) -> PullReport:
        """Bring a sleeping generator back, through a verified pull of the newest publication."""
        self._gate.wake(name)
        return await self._pulls.back(name)

    @served
    async def pin(self, version: PolicyVersion) -> str:
        """Lease a generator that stays at exactly this version and serves only requests with its name in `pinned_to`,
        until `unpin`; see `ServingGate.pin`. Returns its name."""
        name = self._gate.pin(version, self._dispatcher.load)
        self._dispatcher.leased(name, version)
        self._advance()
        return name

    @served
    async def unpin(self, name: str) -> PullReport:
        """End a lease: the generator finishes what it has, pulls the newest publication and serves with the others.
        Requests that still wait for it fail."""
        self._gate.unpin(name)
        self._dispatcher.lease_ended(name)
        return await self._pulls.back(name)

    @served
    async def fleet_status(self) -> list[GeneratorStatus]:
        return [
            GeneratorStatus(
                name=health.name,
                state=health.state.value,
                version=str(health.version) if health.version is not None else "none",
                load=self._dispatcher.load(health.name),
                in_flight=self._dispatcher.in_flight(health.name),
                served=self._requests.served[health.name],
                failed=self._requests.failed[health.name],
                last_error=health.reason,
            )
            for health in self._fleet
        ]

    @served
    async def generator_lost(self, name: str, reason: str) -> None:
        """A process of this generator has ended, as the controller heard from the kernel: what it was asked goes on
        elsewhere at once. A call to a process that is gone may find out late, or never."""
        self._died(name, GeneratorFailed(reason))

    @served
    async def close(self) -> None:
        """Send nothing more; whatever is open fails, and generators stop working on it."""
        self._closed = True
        error = GeneratorFailed("the router was closed")
        self._requests.close(error)
        self._pulls.fail(error)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._requests.leave()

    def _end_sessions(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            self._strategy.end_session(session_id)

    def _advance(self) -> None:
        """After anything that changed who may serve: requests first, so that however fast versions follow each other,
        those who wait are served by what was just verified; then the changes of weights that can begin."""
        if self._closed:
            return
        self._requests.reconsider()
        self._pulls.begin()
        self._pulls.tell()

    def _died(self, name: str, error: TitanError) -> None:
        """A generator answers nobody any more, whoever found out: what it ran goes on elsewhere, and nobody waits for
        its weights. The first word of it counts."""
        if self._fleet[name].state is GeneratorState.DEAD:
            return
        self._gate.died(name, str(error))
        self._dispatcher.lease_ended(name)
        self._requests.lose(name, error)
        self._advance()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the router itself failed", exc_info=error)
            cause = ActorFailed(f"router: {type(error).__name__}: {error}")
            self._pulls.fail(cause)
            self._requests.fail(cause)
