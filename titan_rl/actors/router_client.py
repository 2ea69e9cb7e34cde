"""`Router`: the client of the router, for the controller, gateways and training scripts."""

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
            actor: handle of the actor; rollout workers get the same one.
            seconds: time limit of a call; requests have `router.request_seconds` instead.
        """
        super().__init__(actor, name="router")
        self.actor = actor
        self._seconds = seconds

    async def setup(self) -> list[int]:
        """Wait until the router answers. Returns no process ids."""
        await self.fleet_status()
        return []

    async def pull_model_state_dict(self, publication: Publication) -> FleetPull:
        """Bring the fleet to this publication; returns when no generator is still on its way to it.

        Raises:
            WeightsError: no generator serves it, or it is older than one requested before.
        """
        pull = await self._call(GeneratorRouter.pull_model_state_dict, publication)
        return pull.require_served()

    async def sleep(self, generator: str) -> int:
        """Take a generator out of service; returns the bytes it freed."""
        return await self._call(GeneratorRouter.sleep, generator)

    async def wake_up(self, generator: str) -> PullReport:
        """Bring it back with the newest weights."""
        return await self._call(GeneratorRouter.wake_up, generator)

    async def pin(self, version: PolicyVersion) -> str:
        """Lease a generator for evaluation until `unpin`: it stays at exactly this version and serves only requests
        with its name in `pinned_to`. Returns its name.

        Raises:
            GeneratorNotServing: no generator serves exactly this version now, or no other one would be left to serve.
                Then evaluate with ordinary requests, before the next pull.
        """
        return await self._call(GeneratorRouter.pin, version)

    async def unpin(self, generator: str) -> PullReport:
        """End a lease: the generator finishes its requests, pulls the newest weights and serves everybody again."""
        return await self._call(GeneratorRouter.unpin, generator)

    async def fleet_status(self) -> list[GeneratorStatus]:
        return await self._call(GeneratorRouter.fleet_status)

    async def generator_lost(self, generator: str, reason: str) -> None:
        """Mark a generator as dead: one of its processes has ended."""
        await self._call(GeneratorRouter.generator_lost, generator, reason)

    async def close(self) -> None:
        """Close the router itself. Open requests fail."""
        await self._call(GeneratorRouter.close)
        await self.leave()

    async def _call(self, endpoint: Endpoint[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.connection.call(self._seconds, endpoint, *args, **kwargs)
