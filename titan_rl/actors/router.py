"""`GeneratorRouter`: the one actor in front of all generators.

A thin shell: `Dispatcher` decides which generator serves which request, `Fleet` decides which generator takes new
weights when, and this class makes the calls and waits. `RequestRouter` is its side of requests, here is the fleet's.

Is woken by messages and the end of a pull. Slowness never means that a generator is dead. Nobody waits for a late pull;
its generator serves again once the pull succeeds. One that is late for `ENDLESS_PULLS` is told to end, and is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from titan_rl.actors.connection import served
from titan_rl.actors.generator import Generator
from titan_rl.actors.request_router import RequestRouter, RoutedGenerator
from titan_rl.actors.requests import is_gone
from titan_rl.errors import ActorGone, CallTimeout, GeneratorFailed, TitanError, WeightsError
from titan_rl.observability.activity import activity
from titan_rl.observability.timeline import timeline
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.generator import GeneratorState, GeneratorStatus
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import FleetPull, Publication, PullReport

ENDLESS_PULLS = 5
"""A pull that has taken so many times `router.pull_seconds` will not end: a rank of the generator is stuck in it."""

_log = logging.getLogger(__name__)


class GeneratorRouter(RequestRouter):
    """Endpoints: those of `RequestRouter`, `setup`, `pull_model_state_dict`, `serve_beside`, `retire`, `start_over`,
    `sleep`, `wake_up`, `pin`, `unpin`, `fleet_status`, `generator_joined`, `generator_lost`, `generator_left_out`,
    `resize`, `drain`, `close`."""

    def __init__(
        self,
        config: RouterConfig,
        generators: dict[str, Any],
        serving: int | None = None,
        awaited: Collection[str] = (),
        others: Mapping[str, float] | None = None,
    ) -> None:
        """See `RequestRouter`."""
        super().__init__(config, generators, serving, awaited, others)
        self._publications: dict[PolicyVersion, Publication] = {}  # of the versions that are wanted
        self._syncs: set[asyncio.Task[None]] = set()

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
        others = (each for each in fleet if each.name not in reports)
        failures = {each.name: each.reason or f"it is {'a spare' if each.is_spare else each.state}" for each in others}
        return FleetPull(version=version, reports=reports, failures=failures)

    @served
    async def setup(self, wanted: Sequence[Publication]) -> int:
        """Let generators serve these versions, which a router before this one was asked for, without waiting for it.
        Returns this process's id."""
        timeline.follow(lambda: "generators" if self._asked_by else "rollouts")
        for publication in wanted:
            self._want_beside(publication)
        self._advance()
        return os.getpid()

    @served
    async def serve_beside(self, publication: Publication) -> None:
        """Let some generator serve exactly this version until `retire`, beside the versions that are served already.
        Returns when one does, or when the version is retired.

        Raises:
            WeightsError: no generator can; says why.
        """
        version, fleet = publication.version, self._fleet
        self._want_beside(publication)
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
    async def start_over(self) -> None:
        """The versions that were requested are of no use any more; the next ones may be older."""
        self._fleet.start_over()

    @served
    async def sleep(self, name: str) -> int:
        """Take a generator out of service until `wake_up`. Its requests continue elsewhere. Returns the bytes freed."""
        self._fleet.sleep(name)
        self._advance()
        try:
            return await self._generators[name].client.connection.call(None, Generator.sleep)
        except ActorGone as error:  # which a caller would take for the end of this router
            raise GeneratorFailed(f"{name} did not fall asleep: {error}") from error

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

    def _want_beside(self, publication: Publication) -> None:
        self._fleet.ask_beside(publication.version)
        self._publications[publication.version] = publication

    async def _back(self, name: str) -> PullReport:
        """Wait until a returning generator serves the newest publication."""
        assert (newest := self._fleet.target) is not None
        generator, health = self._generators[name], self._fleet[name]
        generator.outcome = None
        self._advance()
        await self._until(lambda: self._fleet.settled(newest) or health.state is GeneratorState.DEAD)
        outcome = generator.outcome
        if outcome is None:
            raise GeneratorFailed(f"{name} did not come back: {health.reason or health.state}")
        if isinstance(outcome, ActorGone):  # which a caller would take for the end of this router
            raise GeneratorFailed(f"{name} did not come back: {outcome}")
        if isinstance(outcome, TitanError):
            raise outcome
        return outcome

    def _advance(self) -> None:
        """Requests first, so that a generator that was just verified serves those that wait however fast versions
        follow each other; then the changes of weights that can begin."""
        super()._advance()
        if self._ended is not None:
            return
        for name in self._fleet.startable(self._dispatcher.load, self._dispatcher.demanded):
            generator = self._generators[name]
            task = generator.sync = asyncio.get_running_loop().create_task(self._sync(generator))
            self._syncs.add(task)
            task.add_done_callback(self._synced)

    def _synced(self, task: asyncio.Task[None]) -> None:
        self._syncs.discard(task)
        if not task.cancelled():
            self._or_end(task.result)

    async def _sync(self, generator: RoutedGenerator) -> None:
        """Change the weights of one generator: drain it, pull, let it serve again. Cancelled when it dies."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        name = generator.name
        drain, pull = self._config.drain_seconds, self._config.pull_seconds
        # The drain counts too, because a stopped process never finishes it.
        late = loop.call_later(drain + pull, self._or_end, self._is_late, generator)
        endless = loop.call_later(drain + ENDLESS_PULLS * pull, self._or_end, self._is_stuck, generator)
        try:
            if self._fleet.must_drain(name):
                with activity("drain", generator=name):
                    await self._drained(generator, drain)
            late.cancel()
            late = loop.call_later(pull, self._or_end, self._is_late, generator)
            publication = self._publications[self._fleet.pulling(name)]
            waited = loop.time() - started
            call = generator.client.connection.call
            if self._fleet[name].sync_from is GeneratorState.RECOVERING:
                await call(None, Generator.reset)  # a router before this one may have left requests there
            with activity("pull", generator=name, version=publication.version):
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
                self._died(generator, error)
            else:
                self._fleet.failed(name, str(error))
        finally:
            late.cancel()
            endless.cancel()
        self._advance()

    async def _drained(self, generator: RoutedGenerator, seconds: float) -> None:
        """Wait until the generator is idle. Requests that still run after `seconds` are moved to other generators."""
        name = generator.name
        try:
            async with asyncio.timeout(seconds):
                await self._until(lambda: not self._dispatcher.in_flight(name))
        except TimeoutError:
            stragglers = self._dispatcher.live_on(name)
            _log.info("%s did not drain in %g s: %d go on elsewhere", name, seconds, len(stragglers))
            generator.client.abort(stragglers)
            await self._until(lambda: not self._dispatcher.in_flight(name))

    def _is_late(self, generator: RoutedGenerator) -> None:
        name = generator.name
        if self._generators[name] is not generator:
            return
        limit = f"router.pull_seconds ({self._config.pull_seconds:g})"
        error = CallTimeout(f"{name} takes new weights for longer than {limit}; it serves nothing until it has them")
        _log.warning("%s", error)
        generator.outcome = error
        self._fleet.late(name, str(error))
        self._advance()

    def _is_stuck(self, generator: RoutedGenerator) -> None:
        limit = f"{ENDLESS_PULLS} times router.pull_seconds ({self._config.pull_seconds:g})"
        reason = f"{generator.name} takes new weights for longer than {limit}: it ends, to be replaced"
        _log.warning("%s", reason)
        generator.client.connection.tell(Generator.fail, reason)

    # The fleet.

    @served
    async def fleet_status(self) -> list[GeneratorStatus]:
        """Every generator as the router sees it."""
        load, in_flight = self._dispatcher.load, self._dispatcher.in_flight
        return [
            self._fleet[name].status(
                load(name),
                in_flight(name),
                generator.served,
                generator.failed,
                generator.aborted,
                generator.aborted_tokens,
            )
            for name, generator in self._generators.items()
        ]

    @served
    async def generator_lost(self, name: str, reason: str) -> None:
        """Mark a generator as dead: the kernel told the controller that one of its processes ended. Its requests
        continue elsewhere at once. Without this, a call to the dead process may notice late or never. A generator that
        died before this router was there may be unknown."""
        if name in self._generators:
            self._died(self._generators[name], GeneratorFailed(reason))

    @served
    async def generator_joined(self, name: str, rank0: Any) -> None:
        """A generator is set up: a new one, or one in the place of a dead one.

        Args:
            rank0: handle of its rank 0.
        """
        await GeneratorRouter.generator_lost.answer(self, name, "it was replaced")
        self._join(name, rank0)
        self._advance()

    @served
    async def resize(self, serving: int) -> None:
        """So many generators are to be in service from now on; the others are spares."""
        self._fleet.resize(serving)
        self._advance()

    @served
    async def drain(self, name: str) -> None:
        """Give a generator nothing new, because it will be taken away. Returns when it has nothing left; what runs
        longer than `router.drain_seconds` goes on elsewhere."""
        if name not in self._generators:
            return
        generator, health, config = self._generators[name], self._fleet[name], self._config
        self._fleet.leaves(name)
        with suppress(TimeoutError):  # whoever waits for it longer will hear that it is gone
            async with asyncio.timeout(config.drain_seconds + config.pull_seconds):
                await self._until(lambda: not health.is_syncing and health.state is not GeneratorState.PINNED)
        if health.state in (GeneratorState.SERVING, GeneratorState.RECOVERING) and not health.is_syncing:
            self._fleet.sleep(name)
            self._advance()
            await self._drained(generator, config.drain_seconds)

    @served
    async def generator_left_out(self, name: str, reason: str) -> None:
        """A generator is dead and will not be replaced. When all are left out, requests fail."""
        await GeneratorRouter.generator_lost.answer(self, name, reason)
        self._fleet.left_out(name, reason)
        self._advance()

    @served
    async def close(self) -> None:
        """Send nothing more. Open requests fail, and the generators stop them."""
        self._end(GeneratorFailed("the router was closed"))
        for task in self._syncs:
            task.cancel()
        await asyncio.gather(*self._syncs, return_exceptions=True)
        for generator in self._generators.values():
            await generator.client.disconnect()
