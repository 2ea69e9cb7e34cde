"""Changes of weights behind the router: `VersionPlan` decides who takes which version when, this class makes the calls.

    want ─▶ begin ─▶ drain: wait until the generator is idle ─▶ pull ─▶ verified: it serves
                                                                   └─▶ failed: STALE, and maybe tried again

Slowness never means that a generator is dead. Nobody waits for a late pull; its generator serves again once the pull
succeeds. One that is late for `ENDLESS_PULLS` is told to end, and is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from titan_rl.actors.generator import Generator
from titan_rl.errors import GeneratorFailed, GeneratorNotServing, TitanError, WeightsError
from titan_rl.metrics.activity import activity
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Dispatcher
from titan_rl.routing.health import Fleet, GeneratorStatus, Phase
from titan_rl.routing.version_plan import VersionPlan
from titan_rl.rpc.requests import Failures, Packed, RequestClient, is_gone
from titan_rl.types import Completion, Piece, PolicyVersion
from titan_rl.weights.manifest import FleetPull, Publication

ENDLESS_PULLS = 5
"""A pull that has taken so many times `router.pull_seconds` will not end: a rank of the generator is stuck in it."""

_log = logging.getLogger(__name__)


class Router(Protocol):
    """The router, as its generators and the changes of their weights see it."""

    config: RouterConfig
    fleet: Fleet
    dispatcher: Dispatcher
    generators: dict[str, RoutedGenerator]

    def show(self, pieces: list[Piece]) -> None: ...
    def route(self, generator: RoutedGenerator, completions: Packed[Completion], failures: Failures) -> None: ...
    def died(self, generator: RoutedGenerator, error: TitanError) -> None: ...
    def advance(self) -> None: ...
    def run(self, work: Callable[..., None], *args: Any) -> None: ...
    async def until(self, holds: Callable[[], bool]) -> None: ...


class RoutedGenerator(RequestClient):
    """A generator as the router deals with it. Its state is the fleet's business. Its replacement is another one."""

    def __init__(self, name: str, rank0: Any, router: Router) -> None:
        super().__init__(rank0, name=name)
        self._router = router
        self.status = GeneratorStatus(name)
        self.sync: asyncio.Task[None] | None = None  # the last one
        self.idle = asyncio.Event()  # set whenever it has answered all it had; whoever waits for that clears it

    def answered(self, completions: Packed[Completion], failures: Failures) -> None:
        self._router.run(self._router.route, self, completions, failures)

    def sampled(self, pieces: list[Piece]) -> None:
        self._router.show(pieces)


class WeightSync:
    def __init__(self, router: Router) -> None:
        self._router = router
        self.plan = VersionPlan(router.fleet, router.config)
        self._publications: dict[PolicyVersion, Publication] = {}  # of the wanted versions

    def want(self, wanted: Sequence[Publication], *, served: bool = False) -> None:
        """These are to be served, and no others. `served`: they were, by a router before this one."""
        self._publications = {publication.version: publication for publication in wanted}
        self.plan.want(self._publications)
        if served:
            self.plan.served |= self._publications.keys()

    def begin(self) -> None:
        for name in self.plan.begin(self._router.dispatcher):
            generator = self._router.generators[name]
            generator.sync = asyncio.get_running_loop().create_task(self._change(generator))
            generator.sync.add_done_callback(self._ended)

    def report(self, version: PolicyVersion) -> FleetPull:
        """Who serves the version, and why others serve nothing."""
        version = self.plan.counted(version)
        serving, failures = [], {}
        for health in self._router.fleet:
            if not health.phase.serves:
                failures[health.name] = health.reason or f"it is {health.phase}"
            elif health.version == version:
                serving.append(health.name)
        return FleetPull(version=version, serving=tuple(serving), failures=failures)

    async def wake_up(self, name: str) -> PolicyVersion:
        """Let a sleeping generator pull and serve again. Raises GeneratorFailed: it does not come back;
        GeneratorNotServing: it is not asleep, or no weights were published yet."""
        if not self.plan.wanted:
            raise GeneratorNotServing(f"{name} cannot be woken: there are no weights to pull yet")
        self._router.fleet[name].wake()
        self._router.advance()
        await self._router.until(lambda: not self.plan.is_coming(name))
        health = self._router.fleet[name]
        if health.version is None or not health.phase.serves:
            raise GeneratorFailed(f"{name} did not come back: {health.reason}")
        return health.version

    async def stop(self) -> None:
        tasks = [generator.sync for generator in self._router.generators.values() if generator.sync is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _change(self, generator: RoutedGenerator) -> None:
        """Change the weights of one generator: drain it, pull, let it serve again. Cancelled when it dies."""
        loop = asyncio.get_running_loop()
        name, health = generator.name, self._router.fleet[generator.name]
        drain, pull = self._router.config.drain_seconds, self._router.config.pull_seconds
        # The drain counts too, because a stopped process never finishes it.
        late = loop.call_later(drain + pull, self._router.run, self._mark_late, generator)
        endless = loop.call_later(drain + ENDLESS_PULLS * pull, self._router.run, self._end_stuck, generator)
        try:
            if health.phase is not Phase.SWAPPING:
                with activity("drain", generator=name):
                    await self._drained(generator, drain)
            late.cancel()
            late = loop.call_later(pull, self._router.run, self._mark_late, generator)
            publication = self._publications[self.plan.pulling(name)]
            call = generator.connection.call
            if health.version is None:
                await call(None, Generator.client_lost, None)  # a router before this one may have left requests there
            with activity("pull", generator=name, version=publication.version):
                if health.must_wake:
                    version = await call(None, Generator.wake_up, publication)
                else:
                    version = await call(None, Generator.pull_model_state_dict, publication)
            self.plan.verified(name, version)
        except Exception as why:  # whatever fails here concerns this generator only
            error = why if isinstance(why, TitanError) else WeightsError(f"{type(why).__name__}: {why}")
            _log.warning("%s did not take new weights: %s", name, error, exc_info=None if error is why else why)
            if is_gone(error):
                self._router.died(generator, error)
            else:
                self.plan.failed(name, str(error))
        finally:
            late.cancel()
            endless.cancel()
        self._router.advance()

    async def _drained(self, generator: RoutedGenerator, seconds: float) -> None:
        """Wait until the generator is idle. Requests that still run after `seconds` are moved to other generators."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle(generator)
        except TimeoutError:
            stragglers = self._router.dispatcher.live_on(generator.name)
            _log.info("%s did not drain in %g s: %d go on elsewhere", generator.name, seconds, len(stragglers))
            generator.abort(stragglers)
            await self._idle(generator)

    async def _idle(self, generator: RoutedGenerator) -> None:
        """Wait for this generator alone: to look at all that drain whenever one answers would be quadratic."""
        while self._router.dispatcher.in_flight(generator.name):
            generator.idle.clear()
            await generator.idle.wait()

    def _mark_late(self, generator: RoutedGenerator) -> None:
        name = generator.name
        if self._router.generators[name] is not generator:
            return
        limit = f"router.pull_seconds ({self._router.config.pull_seconds:g})"
        reason = f"{name} takes new weights for longer than {limit}; it serves nothing until it has them"
        _log.warning("%s", reason)
        self._router.fleet[name].late(reason)
        self._router.advance()

    def _end_stuck(self, generator: RoutedGenerator) -> None:
        limit = f"{ENDLESS_PULLS} times router.pull_seconds ({self._router.config.pull_seconds:g})"
        reason = f"{generator.name} takes new weights for longer than {limit}: it ends, to be replaced"
        _log.warning("%s", reason)
        generator.connection.tell(Generator.fail, reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._router.run(task.result)
