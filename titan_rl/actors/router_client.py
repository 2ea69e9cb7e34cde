"""`Router`: the router as the controller, rollout workers, gateways and training scripts see it."""

from __future__ import annotations

from typing import Any, ParamSpec, TypeVar

from titan_rl.actors.calls import Endpoint
from titan_rl.actors.requests import CompletionClient
from titan_rl.actors.router import GeneratorRouter
from titan_rl.generation.reports import FleetPull, PullReport
from titan_rl.routing.fleet import GeneratorStatus
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication

P = ParamSpec("P")
T = TypeVar("T")


class Router(CompletionClient):
    """Handle of a `GeneratorRouter`. Belongs to one event loop."""

    def __init__(self, actor: Any, *, seconds: float) -> None:
        """
        Args:
            actor: handle of the actor; also what rollout workers are given.
            seconds: bound on any one call; requests have `router.request_seconds`.
        """
        super().__init__(actor, name="router")
        self.actor = actor
        self._seconds = seconds

    async def setup(self) -> list[int]:
        """Wait until it answers; it tells no process id."""
        await self.fleet_status()
        return []

    async def pull_model_state_dict(self, publication: Publication) -> FleetPull:
        """Bring the fleet to this publication; returns when no generator is on its way to it any more.

        Raises:
            WeightsError: nobody serves it, or it is older than what was asked for before.
        """
        pull = await self._call(GeneratorRouter.pull_model_state_dict, publication)
        return pull.require_served()

    async def sleep(self, generator: str) -> int:
        """Take a generator out of service; returns the bytes it gave up."""
        return await self._call(GeneratorRouter.sleep, generator)

    async def wake_up(self, generator: str) -> PullReport:
        """Bring it back with the newest weights."""
        return await self._call(GeneratorRouter.wake_up, generator)

    async def pin(self, version: PolicyVersion) -> str:
        """Lease a generator for evaluation: it stays at exactly this version and serves only requests with its name
        in `pinned_to`, until `unpin`. Returns its name.

        Raises:
            GeneratorNotServing: nobody serves exactly this version now, or nobody else would serve; then evaluate by
                ordinary requests, before the next pull.
        """
        return await self._call(GeneratorRouter.pin, version)

    async def unpin(self, generator: str) -> PullReport:
        """End a lease: the generator finishes what it has, takes the newest weights and serves everybody again."""
        return await self._call(GeneratorRouter.unpin, generator)

    async def fleet_status(self) -> list[GeneratorStatus]:
        return await self._call(GeneratorRouter.fleet_status)

    async def generator_lost(self, generator: str, reason: str) -> None:
        """A process of this generator has ended: it serves nobody any more."""
        await self._call(GeneratorRouter.generator_lost, generator, reason)

    async def close(self) -> None:
        """Close the router itself: whatever is open fails."""
        await self._call(GeneratorRouter.close)
        await self.leave()

    async def _call(self, endpoint: Endpoint[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.connection.call(self._seconds, endpoint, *args, **kwargs)
