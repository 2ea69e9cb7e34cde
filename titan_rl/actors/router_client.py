"""`RouterClient`: the client of a `GeneratorRouter`, for rollout workers, gateways, the controller and scripts."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from titan_rl.actors.router import GeneratorRouter
from titan_rl.errors import RequestError, WeightsError
from titan_rl.routing.attempts import Shown
from titan_rl.routing.health import GeneratorStatus
from titan_rl.rpc.connection import RemoteMethod
from titan_rl.rpc.requests import Failures, Packed, RequestClient
from titan_rl.types import Completion, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import FleetPull, Publication

P = ParamSpec("P")
T = TypeVar("T")


class RouterClient(RequestClient):
    """Belongs to one event loop. `generate` and `stream` work with any `RequestServer`.

    If the router is gone, open requests and calls wait for its replacement, which is asked again: a completion is a
    function of its request, so the caller sees only that it took longer.
    """

    actor_class = GeneratorRouter

    def __init__(
        self, actor: Any = None, *, seconds: float, name: str = "router", who: str = "", is_replaced: bool = False
    ) -> None:
        super().__init__(actor, name=name, who=who, is_replaced=is_replaced)
        self._seconds = seconds  # limit of a call that waits for no generator
        self._completions: dict[str, asyncio.Future[Completion]] = {}
        self._shows: dict[str, Callable[[Piece], None]] = {}  # of requests that stream
        self._wanted: tuple[Publication, ...] = ()  # what this client wants to be served

    # Requests.

    async def generate(self, request: GenerationRequest) -> Completion:
        """The completion of one request. Cancelling the call aborts the engine's work. Raises RequestError: the request
        is invalid, or generators died while they ran it; GeneratorFailed, ActorFailed: no generator can serve it."""
        asked_at = time.monotonic()
        completion = await self.retry_on_replacement(lambda: self._generate(request))
        elsewhere = time.monotonic() - asked_at - completion.metrics.get("generation/seconds_in_engine", 0.0)
        completion.metrics["generation/seconds_waiting"] = elsewhere
        return completion

    async def _generate(self, request: GenerationRequest) -> Completion:
        """Ask the router that is there now."""
        request_id = request.request_id
        if request_id in self._open:  # its answer may be on the way and would be taken for this request's
            raise _in_use(request_id)
        completion = self._completions[request_id] = asyncio.get_running_loop().create_future()
        self.send((request,))
        try:
            return await completion
        except asyncio.CancelledError:
            self.abort([request_id])
            raise
        finally:
            self._completions.pop(request_id, None)

    async def stream(self, request: GenerationRequest, on_piece: Callable[[Piece], object]) -> Completion:
        """As `generate`. Until it returns, `on_piece` is called with the tokens in pieces, as they are sampled; it must
        not raise. They hold each token once and in order, even if the request moves to another generator or weights."""
        request_id, shown = request.request_id, Shown()
        if request_id in self._shows or request_id in self._open:
            raise _in_use(request_id)

        def show(piece: Piece | None) -> None:
            if piece is not None:
                on_piece(piece)

        self._shows[request_id] = lambda piece: show(shown.add(piece))
        try:
            completion = await self.generate(replace(request, stream_from=0))
            show(shown.rest(completion))
            return completion
        finally:
            del self._shows[request_id]

    def answered(self, completions: Packed[Completion], failures: Failures) -> None:
        for completion in completions.unpack():
            future = self._completions.get(completion.request_id)
            if future is not None and not future.done():
                future.set_result(completion)
        for request_id, error in failures:
            future = self._completions.get(request_id)
            if future is not None and not future.done():
                future.set_exception(error)

    def sampled(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if (show := self._shows.get(piece.request_id)) is not None:
                show(piece)

    # The fleet.

    async def _set_up(self, peers: dict[str, Any]) -> list[int]:
        return [await self.connection.call(self._seconds, GeneratorRouter.setup, self._wanted)]

    async def pull_model_state_dict(self, *wanted: Publication, version: PolicyVersion | None = None) -> FleetPull:
        """Let the fleet serve these publications, each by some generator, and no others; most serve the newest.

        Returns when `version` (default: the newest) is served, and no generator is on its way to it. If a later call
        does not want it any more, that call's newest version counts instead. Raises WeightsError: no generator serves
        it, and none will; names every generator and the reason.
        """
        self._wanted = wanted
        newest = max(publication.version for publication in wanted)

        call, endpoint = self.connection.call, GeneratorRouter.pull_model_state_dict
        # a call that is made again wants what was wanted last
        outcome = await self.retry_on_replacement(lambda: call(None, endpoint, self._wanted, version or newest))
        if not outcome.serving:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in outcome.failures.items())
            raise WeightsError(f"{outcome.version} is served by nobody: {reasons}")
        return outcome

    async def until_unavailable(self) -> str:
        """Returns when a wanted version that was served cannot be loaded again by any generator: which, and why."""
        return await self.call(GeneratorRouter.until_unavailable)

    async def fleet_status(self) -> list[GeneratorStatus]:
        """As the router that is there now sees it. Raises ActorGone if there is none."""
        return await self.connection.call(self._seconds, GeneratorRouter.fleet_status)

    async def close(self) -> None:
        """Close the router itself. Open requests fail."""
        await self.connection.call(self._seconds, GeneratorRouter.close)
        await self.disconnect()

    async def call(self, endpoint: RemoteMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the router that is there, or will be. Without a bound: no clock here knows how many generators drain or
        pull one after the other. The router bounds each of their steps, and a router that hangs is replaced."""
        return await self.retry_on_replacement(lambda: self.connection.call(None, endpoint, *args, **kwargs))


def _in_use(request_id: str) -> RequestError:
    return RequestError(f"request id {request_id} is in use; an id names one attempt")
