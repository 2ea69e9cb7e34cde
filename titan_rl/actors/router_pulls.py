"""The router's pulls: how the fleet comes to serve new weights, one generator after another or all at once.

`ServingGate` decides who takes weights when; this class makes the calls and waits. A pull ends when no generator is on
its way to its version any more, whatever became of each; pulls that overlap are served by the newest publication. A
generator that is late is not gone: nobody waits for it any more, and it serves again once its pull ends well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from titan_rl.actors.calls import is_fatal
from titan_rl.actors.connection import Connection
from titan_rl.actors.generator import Generator
from titan_rl.actors.router_reports import FleetPull
from titan_rl.errors import CallTimeout, GeneratorFailed, TitanError, WeightsError
from titan_rl.generation.reports import PullReport
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.fleet import FleetHealth, GeneratorState
from titan_rl.routing.gate import ServingGate
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication

_OUT_OF_SERVICE = (GeneratorState.ASLEEP, GeneratorState.PINNED, GeneratorState.STALE, GeneratorState.DEAD)
"""What a generator may have become after its last good pull: it serves nobody then, or not everybody."""

_log = logging.getLogger(__name__)


class RouterPulls:
    """Belongs to the router's event loop."""

    def __init__(
        self,
        gate: ServingGate,
        fleet: FleetHealth,
        generators: dict[str, Any],
        config: RouterConfig,
        *,
        load: Callable[[str], int],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        drained: Callable[[str, float], Coroutine[Any, Any, None]],
        on_died: Callable[[str, TitanError], None],
        on_change: Callable[[], None],
    ) -> None:
        """
        Args:
            generators: name → handle of rank 0 of that generator.
            load: what a generator has to do.
            spawn: runs a task that is watched.
            drained: waits until a generator is idle, for so many seconds before what it runs is interrupted.
            on_died: a generator answers nobody any more, and why.
            on_change: who may serve, or take weights, may have changed; calls `advance` among others.
        """
        self._gate = gate
        self._fleet = fleet
        self._generators = {name: Connection(rank0, what=f"{name}.{{}}") for name, rank0 in generators.items()}
        self._config = config
        self._load = load
        self._spawn = spawn
        self._drained = drained
        self._on_died = on_died
        self._on_change = on_change
        self._publication: Publication | None = None  # the newest that was asked for
        self._outcomes: dict[str, PullReport | TitanError] = {}  # of each generator's last pull
        self._callers: dict[asyncio.Future[None], PolicyVersion] = {}  # that wait for the fleet to settle

    async def pull(self, publication: Publication) -> FleetPull:
        """Bring every generator to this publication or a newer one, each on its own schedule.

        Raises:
            WeightsError: older than what was asked for before.
        """
        self._gate.ask(publication.version)
        self._publication = publication
        await self._settle(publication.version)
        reports = {
            name: outcome
            for name, outcome in self._outcomes.items()
            if isinstance(outcome, PullReport)
            and outcome.version >= publication.version
            and self._fleet[name].state not in _OUT_OF_SERVICE
        }
        failures = {h.name: h.reason or f"it is {h.state}" for h in self._fleet if h.name not in reports}
        return FleetPull(version=publication.version, reports=reports, failures=failures)

    async def back(self, name: str) -> PullReport:
        """Wait until the generator, which the gate lets come back, serves the newest publication again."""
        assert self._publication is not None
        self._outcomes.pop(name, None)
        await self._settle(self._publication.version)
        outcome = self._outcomes.get(name)
        if outcome is None:
            raise GeneratorFailed(f"{name} did not come back: {self._fleet[name].reason or self._fleet[name].state}")
        if isinstance(outcome, TitanError):
            raise outcome
        return outcome

    async def sleep(self, name: str) -> int:
        """Put a generator to sleep, which the gate has let go; returns the bytes freed."""
        return await self._generators[name].call(None, Generator.sleep)

    def begin(self) -> None:
        """Start every generator's change of weights that may start now."""
        for name in self._gate.startable(self._load):
            self._spawn(self._sync(name))

    def tell(self) -> None:
        """Answer callers whose version nobody is on the way to any more."""
        for settled, version in self._callers.items():
            if not settled.done() and self._gate.settled(version):
                settled.set_result(None)

    def fail(self, error: TitanError) -> None:
        """Whoever waits hears this."""
        for settled in self._callers:
            if not settled.done():
                settled.set_exception(error)

    async def _sync(self, name: str) -> None:
        """One generator's change of weights, from its drain to its first request under them."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        drain, pull = self._config.drain_seconds, self._config.pull_seconds
        late = loop.call_later(drain + pull, self._is_late, name)  # one that is stopped does not even end its drain
        try:
            if self._gate.must_drain(name):
                await self._drained(name, drain)
            late.cancel()
            late = loop.call_later(pull, self._is_late, name)
            version = self._gate.pulling(name)
            publication = self._publication
            assert publication is not None and publication.version == version
            waited = loop.time() - started
            endpoint = Generator.wake_up if self._gate.wakes(name) else Generator.pull_model_state_dict
            report = await self._generators[name].call(None, endpoint, publication)  # bounded by its process's end
            self._gate.verified(name, report.version)
            self._outcomes[name] = replace(report, seconds_waited=waited + report.seconds_waited)
        except Exception as why:  # whatever it is, it is about this generator only
            error = why if isinstance(why, TitanError) else WeightsError(f"{type(why).__name__}: {why}")
            _log.warning("%s did not take new weights: %s", name, error, exc_info=None if error is why else why)
            self._outcomes[name] = error
            if is_fatal(error):
                self._on_died(name, error)
            else:
                self._gate.failed(name, str(error))
        finally:
            late.cancel()
        self._on_change()

    def _is_late(self, name: str) -> None:
        limit = f"router.pull_seconds ({self._config.pull_seconds:g})"
        error = CallTimeout(f"{name} takes new weights for longer than {limit}; it serves nothing until it has them")
        _log.warning("%s", error)
        self._outcomes[name] = error
        self._gate.late(name, str(error))
        self._on_change()

    async def _settle(self, version: PolicyVersion) -> None:
        """Wait until no generator is on its way to `version`."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callers[settled] = version
        try:
            self._on_change()
            await settled
        finally:
            del self._callers[settled]
