"""`RouterClient`: the client of a `GeneratorRouter`, for rollout workers, gateways, the controller and scripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import numpy as np

from titan_rl.actors.connection import ServedMethod
from titan_rl.actors.lifeline import Lifeline
from titan_rl.actors.requests import RequestClient
from titan_rl.actors.router import GeneratorRouter
from titan_rl.errors import ActorGone, GeneratorFailed, RequestError, TitanError
from titan_rl.observability.timeline import Pulse
from titan_rl.routing.generator import GeneratorStatus
from titan_rl.types import Completion, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import FleetPull, Publication, PullReport
from titan_rl.wire import Packed

P = ParamSpec("P")
T = TypeVar("T")


class RouterClient(RequestClient):
    """Belongs to one event loop. `generate` and `stream` work with any `RequestServer`.

    If the router is gone, open requests and calls wait for its replacement, which is asked again: a completion is a
    function of its request, so the caller sees only that it took longer.
    """

    def __init__(self, actor: Any, *, seconds: float, name: str = "router", who: str = "", owned: bool = False) -> None:
        """
        Args:
            actor: handle of the actor; rollout workers get the same one.
            seconds: time limit of a call that waits for no generator; a request has `router.request_seconds`.
            name: of the actor, for errors.
            who: name of the mesh of this client, for `client_lost`.
            owned: somebody replaces an actor that is gone, or ends this client. Otherwise calls fail at once.
        """
        super().__init__(actor, name=name, on_answers=self._resolve, on_pieces=self._show, who=who)
        self.actor = actor
        self._seconds = seconds
        self._lifeline = Lifeline(seconds=None if owned else 0.0)
        self._completions: dict[str, asyncio.Future[Completion]] = {}
        self._inboxes: dict[str, asyncio.Queue[Piece | None]] = {}  # None: the completion is there, or will never be
        self._wanted: dict[PolicyVersion, Publication] = {}  # what this client has asked the fleet to serve

    def lose(self, reason: str) -> None:
        """The router is gone. Open requests and calls wait for `replace`."""
        self.fail(ActorGone(reason))

    def replace(self, actor: Any) -> None:
        """From now on ask this router, beginning with what is open. `setup` follows."""
        self.connection.replace(actor)
        self.actor = actor
        self._lifeline.replaced()

    # Requests.

    async def generate(self, request: GenerationRequest) -> Completion:
        """The completion of one request. Cancelling the call aborts the engine's work.

        Raises:
            RequestError: the request is invalid or ran out of time, or generators died while they ran it.
            GeneratorFailed, ActorFailed: no generator can serve it; the message has the cause.
        """
        asked_at = time.monotonic()
        completion = await self._lifeline.again(lambda: self._generate(request))
        elsewhere = time.monotonic() - asked_at - completion.metrics.get("seconds_in_engine", 0.0)
        completion.metrics["seconds_waiting"] = elsewhere
        return completion

    async def _generate(self, request: GenerationRequest) -> Completion:
        """Ask the router that is there now."""
        request_id = request.request_id
        if self.is_open(request_id):  # its answer may be on the way and would be taken for this request's
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

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
        """Yield the tokens of one request in pieces as they are sampled, then the whole completion.

        The pieces hold each token of the completion once and in order, even if the request moves to another generator
        or to new weights. Closing this iterator early aborts the engine's work.

        Raises:
            RequestError, GeneratorFailed, ActorFailed: as `generate`, at any time.
        """
        request_id = request.request_id
        if request_id in self._inboxes or self.is_open(request_id):
            raise _in_use(request_id)
        inbox = self._inboxes[request_id] = asyncio.Queue()
        completion = asyncio.get_running_loop().create_task(self.generate(replace(request, stream_from=0)))

        def ended(completion: asyncio.Future[Completion]) -> None:
            inbox.put_nowait(None)
            if not completion.cancelled():
                completion.exception()  # marked as retrieved: it is raised below, or nobody needs it

        completion.add_done_callback(ended)
        shown = Shown()
        try:
            while (piece := await inbox.get()) is not None:
                if (new := shown.add(piece)) is not None:
                    yield new
            if (rest := shown.rest(completion.result())) is not None:
                yield rest
            yield completion.result()
        finally:
            del self._inboxes[request_id]
            completion.cancel()

    def _resolve(self, completions: Packed[Completion], failures: list[tuple[str, TitanError]]) -> None:
        for completion in completions.unpack():
            future = self._completions.get(completion.request_id)
            if future is not None and not future.done():
                future.set_result(completion)
        for request_id, error in failures:
            future = self._completions.get(request_id)
            if future is not None and not future.done():
                future.set_exception(error)

    def _show(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if (inbox := self._inboxes.get(piece.request_id)) is not None:
                inbox.put_nowait(piece)

    # The fleet.

    async def setup(self) -> list[int]:
        """Wait until the router answers; returns its process id. A replacement is asked for the versions that are to be
        served, without waiting for them."""
        return [await self._call(GeneratorRouter.setup, tuple(self._wanted.values()))]

    async def pull_model_state_dict(self, publication: Publication) -> FleetPull:
        """Bring the fleet to this publication; returns when no generator is still on its way to it.

        Raises:
            WeightsError: no generator serves it, or it is older than one requested before.
        """
        self._wanted = {publication.version: publication}
        pull = await self._wait(GeneratorRouter.pull_model_state_dict, publication)
        return pull.require_served()

    async def serve_beside(self, publication: Publication) -> None:
        """Let some generator serve exactly this version until `retire`, beside those that are served already.

        Raises:
            WeightsError: no generator can.
        """
        self._wanted[publication.version] = publication
        await self._wait(GeneratorRouter.serve_beside, publication)

    async def retire(self, version: PolicyVersion) -> None:
        """No request will ask for exactly this version any more."""
        self._wanted.pop(version, None)
        await self._call(GeneratorRouter.retire, version)

    async def start_over(self) -> None:
        """The trainer goes on from an earlier state: what the fleet is asked for next may be older than what was."""
        self._wanted = {}
        await self._call(GeneratorRouter.start_over)

    async def sleep(self, generator: str) -> int:
        """Take a generator out of service; returns the bytes it freed."""
        return await self._wait(GeneratorRouter.sleep, generator)

    async def wake_up(self, generator: str) -> PullReport:
        """Bring it back with the newest weights."""
        return await self._wait(GeneratorRouter.wake_up, generator)

    async def pin(self, version: PolicyVersion) -> str:
        """Reserve a generator for evaluation until `unpin`: it stays at exactly this version and serves only requests
        with its name in `pinned_to`. Returns its name.

        Raises:
            GeneratorNotServing: no generator serves exactly this version now, or no other one would be left to serve.
                Then evaluate with ordinary requests, before the next pull.
        """
        return await self._call(GeneratorRouter.pin, version)

    async def unpin(self, generator: str) -> PullReport:
        """End a pin: the generator finishes its requests, pulls the newest weights and serves everybody again."""
        return await self._wait(GeneratorRouter.unpin, generator)

    async def fleet_status(self) -> list[GeneratorStatus]:
        """As the router that is there now sees it. Raises ActorGone if there is none."""
        return await self.connection.call(self._seconds, GeneratorRouter.fleet_status)

    async def generator_lost(self, generator: str, reason: str) -> None:
        """Mark a generator as dead: one of its processes has ended."""
        await self._call(GeneratorRouter.generator_lost, generator, reason)

    async def generator_joined(self, generator: str, rank0: Any) -> None:
        """A generator is set up, maybe in the place of a dead one of its name. It pulls, is verified, and serves; this
        call does not wait for that.

        Args:
            rank0: handle of its rank 0.
        """
        await self._call(GeneratorRouter.generator_joined, generator, rank0)

    async def generator_left_out(self, generator: str, reason: str) -> None:
        """A dead generator will not be replaced. When all are left out, requests fail."""
        await self._call(GeneratorRouter.generator_left_out, generator, reason)

    async def resize(self, serving: int) -> None:
        """So many generators are to be in service from now on; the others are spares."""
        await self._call(GeneratorRouter.resize, serving)

    async def drain(self, generator: str) -> None:
        """Returns when the generator has no requests left; it gets no new ones."""
        await self._wait(GeneratorRouter.drain, generator)

    async def client_lost(self, who: str) -> None:
        """The processes of this mesh are gone: stop their requests. When this returns, their ids may be used again."""
        await self._wait(GeneratorRouter.client_lost, who)

    async def pulse(self) -> list[Pulse]:
        """See `ConnectedActor.pulse`. The caller sets the time limit."""
        return [await self.connection.call(None, GeneratorRouter.pulse)]

    async def close(self) -> None:
        """Close the router itself. Open requests fail."""
        await self.connection.call(self._seconds, GeneratorRouter.close)
        await self.disconnect()

    async def _call(self, endpoint: ServedMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._lifeline.again(lambda: self.connection.call(self._seconds, endpoint, *args, **kwargs))

    async def _wait(self, endpoint: ServedMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what waits for generators: no clock here knows how many of them drain or pull one after the other. The
        router bounds each of their steps, and a router that hangs is replaced."""
        return await self._lifeline.again(lambda: self.connection.call(None, endpoint, *args, **kwargs))


def _in_use(request_id: str) -> RequestError:
    return RequestError(f"request id {request_id} is in use; an id names one attempt")


class Shown:
    """The prefix of one completion that its caller has seen: turns pieces into the completion's tokens, each once.

    Pieces come in the order in which they were sampled. If the fleet does not resume, a lost completion is sampled
    again from its beginning; tokens that were already shown are skipped. Tokens whose pieces were lost come with the
    completion. The caller keeps the logprobs and versions that it saw first; those of a second sampling may differ in
    the last digits.
    """

    def __init__(self) -> None:
        self._token_ids: list[np.ndarray] = []
        self._end = 0

    def add(self, piece: Piece) -> Piece | None:
        """The new part of a piece. None if nothing is new, or if tokens before it are missing."""
        if piece.offset > self._end or piece.end <= self._end:
            return None
        known = self._end - piece.offset
        self._end = piece.end
        new = replace(
            piece,
            offset=piece.offset + known,
            token_ids=piece.token_ids[known:],
            logprobs=piece.logprobs[known:],
            versions=piece.versions[known:],
        )
        self._token_ids.append(new.token_ids)
        return new

    def rest(self, completion: Completion) -> Piece | None:
        """The part of the whole completion that was not shown yet; None if all of it was.

        Raises:
            GeneratorFailed: the completion does not begin with the shown tokens.
        """
        tokens = completion.token_ids
        if self._token_ids and not np.array_equal(tokens[: self._end], np.concatenate(self._token_ids)):
            raise GeneratorFailed(
                f"request {completion.request_id}: its generator was lost after {self._end} tokens were streamed, and "
                f"those that were sampled in their place are others"
            )
        whole = Piece(
            request_id=completion.request_id,
            offset=0,
            token_ids=tokens,
            logprobs=completion.logprobs,
            versions=completion.versions,
        )
        return self.add(whole)
