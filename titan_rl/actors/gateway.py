"""`Gateway`: the HTTP server in front of a router, in its own process. `GatewayClient`: its handle in rollout workers.

The process loads neither torch nor vLLM. Its only TCP port speaks HTTP and JSON. Pickles travel only on Monarch's
channels, which HTTP clients cannot reach.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from titan_rl.actors.connection import ConnectedActor, Connection, served
from titan_rl.actors.lifeline import Lifeline
from titan_rl.actors.router_client import RouterClient
from titan_rl.errors import ActorFailed, ActorGone, ConfigError, GatewayGone, RequestLost, RolloutOver
from titan_rl.gateway.config import GatewayConfig
from titan_rl.observability.timeline import Pulse, timeline
from titan_rl.rollout.turns import RolloutRecord, RolloutRequest
from titan_rl.types import Endpoint

if TYPE_CHECKING:
    from titan_rl.gateway.app import GatewayServer
    from titan_rl.gateway.callers import RolloutKeys

T = TypeVar("T")

STATUS_SECONDS = 20.0
"""Bound on the router's answer about its fleet."""


class Gateway(ConnectedActor):
    """Endpoints: `setup`, `use`, `serve`, `open_rollout`, `idle`, `close_rollout`, `close`."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        model_path: str,
        renderer: str,
        renderer_kwargs: dict[str, Any],
        max_model_len: int,
        run_seed: int = 0,
    ) -> None:
        """
        Args:
            model_path: directory with the tokenizer of the served policy.
            renderer, renderer_kwargs: as in `RolloutConfig`.
            max_model_len: of the generators.
            run_seed: the run's seed; only rollouts sample by it.
        """
        self._config = config
        self._model_path = model_path
        self._renderer = (renderer, renderer_kwargs)
        self._max_model_len = max_model_len
        self._run_seed = run_seed
        self._fleet: RouterClient | None = None
        self._server: GatewayServer | None = None

    @served
    async def setup(self, router: Any, port: int) -> tuple[int, str]:
        """Listen. Returns this process's id and the URL, without `/v1`.

        Args:
            router: handle of a `GeneratorRouter`.
            port: of the gateway that this one replaces; 0: it is the first. Clients know that port. Where every rollout
                is told the address, another one will do if it is taken.

        Raises:
            ConfigError: the address cannot be listened on, or there is no renderer for the checkpoint.
        """
        # Imported here because workers and the controller import this module and do not need the server.
        from titan_rl.chat import make_renderer
        from titan_rl.gateway.app import GatewayServer
        from titan_rl.gateway.calls import ServedPolicy

        name, settings = self._renderer
        renderer = make_renderer(name, self._model_path, settings)
        policy = ServedPolicy(name=self._config.model, renderer=renderer, max_model_len=self._max_model_len)
        self._fleet = fleet = RouterClient(router, seconds=STATUS_SECONDS, who="gateway", owned=True)
        timeline.follow(lambda: "generators" if fleet.waits else "programs")
        config = replace(self._config, port=port or self._config.port)
        try:
            self._server = GatewayServer(config, self._fleet, policy, run_seed=self._run_seed)
        except ConfigError:
            if not (port and config.rollout_keys):
                raise
            self._server = GatewayServer(replace(config, port=0), self._fleet, policy, run_seed=self._run_seed)
        return os.getpid(), self._server.url

    @served
    async def use(self, router: Any) -> None:
        """Ask this router from now on."""
        if self._fleet is not None:
            self._fleet.replace(router)

    @served
    async def serve(self) -> None:
        """Return when the server was closed. An open call of this endpoint is the failure channel.

        Raises:
            ActorFailed: the server ended by itself.
        """
        if self._server is None:
            raise ActorFailed("the gateway was called before setup")
        await self._server.ended()

    @served
    async def open_rollout(self, request: RolloutRequest) -> Endpoint:
        """See `RolloutGateway`."""
        return await self._rollout_keys().open(request)

    @served
    async def idle(self, session_id: str, seconds: float) -> None:
        """See `RolloutGateway`; the call stays open until the rollout is idle."""
        await self._rollout_keys().idle(session_id, seconds)

    @served
    async def close_rollout(self, session_id: str) -> RolloutRecord:
        """See `RolloutGateway`."""
        record = await self._rollout_keys().close(session_id)
        if self._fleet is not None:
            self._fleet.end_sessions([session_id])
        return record

    @served
    async def close(self) -> None:
        """Refuse new calls, end all rollouts and abort open calls; their clients get an error."""
        if self._server is not None:
            await self._server.close()
        if self._fleet is not None:
            await self._fleet.disconnect()

    def _rollout_keys(self) -> RolloutKeys:
        if self._server is None or not self._config.rollout_keys:
            raise ActorFailed("the gateway was called before setup, or has no rollout keys")
        return self._server.rollout_keys


class GatewayMesh:
    """The gateway, or the one that replaces it, as its owner sees it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        """Handle of the actor, for rollout workers."""
        self.url = ""
        """Without `/v1`; known after `setup`."""
        self._asks: Any = None  # a router
        self._calls = Connection(self.actor, what="gateway.{}")

    def replace(self, actor: Any) -> None:
        """From now on this gateway is called."""
        self.actor = actor
        self._calls.replace(actor)

    def lose(self, reason: str) -> None:
        """The gateway is gone or will be killed, with the sessions of its rollouts."""
        self._calls.lose(reason)

    async def setup(self, router: Any, *, seconds: float) -> list[int]:
        """Start to listen, where the gateway before listened; returns the process id."""
        self._asks = router
        pid, self.url = await self._calls.call(seconds, Gateway.setup, router, urlsplit(self.url).port or 0)
        return [pid]

    async def use(self, router: Any) -> None:
        """Let the gateway ask this router from now on, if it does not already: it would send its open requests again.
        One that is gone is told nothing: its successor hears of it in `setup`. One that hangs will be gone."""
        if router is not self._asks:
            self._asks = router
            with suppress(ActorGone):
                await self._calls.call(None, Gateway.use, router)

    async def end(self) -> None:
        """Wait until the gateway is closed. Raises ActorFailed if it ends by itself or its process is gone."""
        await self._calls.call(None, Gateway.serve)

    async def pulse(self) -> list[Pulse]:
        """How often the gateway has answered. The caller sets the time limit."""
        return [await self._calls.call(None, Gateway.pulse)]

    async def close(self) -> None:
        """Refuse new calls. The caller sets the time limit."""
        await self._calls.call(None, Gateway.close)


class GatewayClient:
    """`RolloutGateway` by calls to a `Gateway` actor, or to the one that replaces it.

    Sessions end with their gateway: `idle` and `close` then raise GatewayGone. `close` raises ActorGone if too many
    generators died under a request of the session. An end that nobody tells this process of, it hears of with the
    replacement, so no call has a bound of its own.
    """

    def __init__(self, gateway: Any, *, owned: bool = False) -> None:
        """
        Args:
            gateway: handle of the actor.
            owned: `open` waits for the replacement of an actor that is gone: somebody replaces it, or ends this client.
        """
        self._calls = Connection(gateway, what="gateway.{}")
        self._lifeline = Lifeline(seconds=None if owned else 0.0)

    def replace(self, gateway: Any) -> None:
        """From now on this actor is called."""
        self._calls.replace(gateway)
        self._lifeline.replaced()

    async def open(self, request: RolloutRequest) -> Endpoint:
        return await self._lifeline.again(lambda: self._calls.call(None, Gateway.open_rollout, request))

    async def idle(self, session_id: str, seconds: float) -> None:
        await self._of_session(session_id, self._calls.call(None, Gateway.idle, session_id, seconds))

    async def close(self, session_id: str) -> RolloutRecord:
        return await self._of_session(session_id, self._calls.call(None, Gateway.close_rollout, session_id))

    async def _of_session(self, session_id: str, call: Awaitable[T]) -> T:
        try:
            return await call
        except (ActorGone, RolloutOver) as error:  # it was opened at a gateway before this one
            raise GatewayGone(f"rollout {session_id} was lost with its gateway: {error}") from error
        except RequestLost as error:
            raise ActorGone(f"rollout {session_id} was lost: {error}") from error
