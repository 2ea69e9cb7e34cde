"""`Router`: the router as the controller, rollout workers' owners and training scripts see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.actors.connection import Connection
from titan_rl.actors.transport import CompletionClient
from titan_rl.errors import WeightsError
from titan_rl.generation.reports import PullReport
from titan_rl.types import Completion, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import Publication


@dataclass(frozen=True, slots=True)
class GeneratorStatus:
    """One generator as the router sees it; plain numbers and words."""

    name: str
    state: str
    """A `routing.fleet.GeneratorState`."""
    version: str
    load: int
    """Estimated tokens in flight."""
    in_flight: int
    """Requests that it runs or is about to run."""
    served: int
    """Completions given to callers whose last part came from here."""
    failed: int
    """Attempts that ended in an error."""
    last_error: str
    """Why it is stale or dead."""


@dataclass(frozen=True, slots=True)
class FleetPull:
    """How one pull went, over the whole fleet."""

    version: PolicyVersion
    reports: dict[str, PullReport]
    """Of the generators that serve the version, or a newer one that overtook it."""
    failures: dict[str, str]
    """Of those that do not: why."""

    def require_served(self) -> FleetPull:
        """This pull, if anybody serves the version.

        Raises:
            WeightsError: nobody does; names every generator and why.
        """
        if not self.reports:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())
            raise WeightsError(f"{self.version} is served by nobody: {reasons}")
        return self


class Router:
    """Handle of a `GeneratorRouter`. Belongs to one event loop."""

    def __init__(self, actor: Any, *, seconds: float) -> None:
        """
        Args:
            actor: handle of the actor; also what rollout workers are given.
            seconds: bound on any one call; requests have `router.request_seconds`.
        """
        self.actor = actor
        self._connection = Connection(actor, what="router.{}")
        self._seconds = seconds
        self._completions: CompletionClient | None = None

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion from whichever generator the router chooses; see `CompletionClient.generate`."""
        return await self._client().generate(request)

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
        """The same in pieces, as they are sampled; see `CompletionClient.stream`."""
        return self._client().stream(request)

    async def pull_model_state_dict(self, publication: Publication) -> FleetPull:
        """Bring the fleet to this publication; returns when no generator is on its way to it any more.

        Raises:
            WeightsError: nobody serves it, or it is older than what was asked for before.
        """
        pull: FleetPull = await self._call("pull_model_state_dict", publication)
        return pull.require_served()

    async def sleep(self, generator: str) -> int:
        """Take a generator out of service; returns the bytes it gave up."""
        return await self._call("sleep", generator)

    async def wake_up(self, generator: str) -> PullReport:
        """Bring it back with the newest weights."""
        return await self._call("wake_up", generator)

    async def pin(self, version: PolicyVersion) -> str:
        """Lease a generator for evaluation: it stays at exactly this version and serves only requests with its name
        in `pinned_to`, until `unpin`. Returns its name.

        Raises:
            GeneratorNotServing: nobody serves exactly this version now, or nobody else would serve; then evaluate by
                ordinary requests, before the next pull.
        """
        return await self._call("pin", version)

    async def unpin(self, generator: str) -> PullReport:
        """End a lease: the generator finishes what it has, takes the newest weights and serves everybody again."""
        return await self._call("unpin", generator)

    def end_sessions(self, session_ids: Sequence[str]) -> None:
        """These conversations are over; see `CompletionClient.end_sessions`."""
        self._client().end_sessions(session_ids)

    async def fleet_status(self) -> list[GeneratorStatus]:
        return await self._call("fleet_status")

    async def generator_lost(self, generator: str, reason: str) -> None:
        """A process of this generator has ended: it serves nobody any more."""
        await self._call("generator_lost", generator, reason)

    async def close(self) -> None:
        if self._completions is not None:
            await self._completions.close()
        await self._call("close")

    def _client(self) -> CompletionClient:
        if self._completions is None:
            self._completions = CompletionClient(self.actor, name="router")
        return self._completions

    async def _call(self, endpoint: str, *args: Any) -> Any:
        return await self._connection.call(endpoint, *args, seconds=self._seconds)
