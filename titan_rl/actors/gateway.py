"""`Gateway`: the HTTP server in front of a router, in its own process. `RolloutGatewayClient`: its handle in workers.

The process loads neither torch nor vLLM. Its only TCP port speaks HTTP and JSON. Pickles travel only on Monarch's
channels, which HTTP clients cannot reach.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from titan_rl.actors.router_client import RouterClient
from titan_rl.config import RunConfig
from titan_rl.errors import ActorFailed, ActorGone, ConfigError, GatewayGone, RequestLost, RolloutOver
from titan_rl.gateway.config import GatewayConfig
from titan_rl.metrics.timeline import timeline
from titan_rl.rollout.trajectory import RolloutRequest, Trajectory
from titan_rl.rpc.connection import ConnectedActor, endpoint
from titan_rl.rpc.mesh_client import MeshClient
from titan_rl.types import Endpoint

if TYPE_CHECKING:
    from titan_rl.gateway.app import GatewayServer

T = TypeVar("T")

STATUS_SECONDS = 20.0
"""Bound on the router's answer about its fleet."""


class Gateway(ConnectedActor):
    """`open_rollout`, `idle` and `close_rollout` are the methods of `RolloutGateway`."""

    def __init__(self, config: RunConfig, gateway: GatewayConfig, *, model_path: str) -> None:
        self._config, self._gateway = config, gateway
        self._model_path = model_path
        self._fleet = RouterClient(seconds=STATUS_SECONDS, who="gateway", is_replaced=True)
        self._server: GatewayServer | None = None

    @endpoint
    async def setup(self, router: Any, port: int) -> tuple[int, str]:
        """Listen. Returns this process's id and the URL, without `/v1`. Raises ConfigError: the address cannot be
        listened on, or there is no renderer for the checkpoint.

        `port`: of the gateway that this one replaces; 0: it is the first. Clients know that port. Where every rollout
        is told the address, another one will do if it is taken.
        """
        # Imported here because workers and the controller import this module and do not need the server.
        from titan_rl.chat import make_renderer
        from titan_rl.gateway.app import GatewayServer
        from titan_rl.gateway.calls import ServedPolicy

        config, listens = self._config, replace(self._gateway, port=port or self._gateway.port)
        renderer = make_renderer(config.rollout.renderer, self._model_path, config.rollout.renderer_kwargs)
        max_model_len = config.generator.max_model_len
        policy = ServedPolicy(name=listens.model, renderer=renderer, max_model_len=max_model_len)
        self._fleet.replace([router])
        timeline.follow(lambda: "generators" if self._fleet.waits else "programs")
        try:
            self._server = GatewayServer(listens, self._fleet, policy, run_seed=config.seed)
        except ConfigError:
            if not (port and listens.rollout_keys):
                raise
            self._server = GatewayServer(replace(listens, port=0), self._fleet, policy, run_seed=config.seed)
        return os.getpid(), self._server.url

    @endpoint
    async def set_peers(self, router: Any) -> None:
        """Open requests are sent again to this router."""
        self._fleet.replace([router])

    @endpoint
    async def serve(self) -> None:
        await self._listening().ended()

    @endpoint
    async def open_rollout(self, request: RolloutRequest) -> Endpoint:
        return await self._listening().rollout_keys.open(request)

    @endpoint
    async def idle(self, session_id: str, seconds: float) -> None:
        await self._listening().rollout_keys.idle(session_id, seconds)

    @endpoint
    async def close_rollout(self, session_id: str) -> Trajectory:
        return await self._listening().rollout_keys.close(session_id)

    @endpoint
    async def close(self) -> None:
        """Refuse new calls, end all rollouts and abort open calls; their clients get an error."""
        if self._server is not None:
            await self._server.close()
        await self._fleet.disconnect()

    def _listening(self) -> GatewayServer:
        if self._server is None:
            raise ActorFailed("the gateway was called before setup")
        return self._server


class GatewayClient(MeshClient):
    actor_class = Gateway

    def __init__(self, *, start_seconds: float) -> None:
        super().__init__("gateway", start_seconds=start_seconds)
        self.url = ""
        """Without `/v1`; known after `setup`."""

    async def _set_up(self, peers: dict[str, Any]) -> list[int]:
        """Listen where the gateway before listened."""
        port = urlsplit(self.url).port or 0
        pid, self.url = await self.ranks[0].call(self.start_seconds, Gateway.setup, port=port, **peers)
        return [pid]


class RolloutGatewayClient:
    """`RolloutGateway` by calls to a `Gateway` actor, or to the one that replaces it.

    Sessions end with their gateway: `idle` and `close` then raise GatewayGone. `close` raises ActorGone if too many
    generators died under a request of the session. An end that nobody tells this process of, it hears of with the
    replacement, so no call has a bound of its own.
    """

    def __init__(self, gateway: Any, *, is_replaced: bool = False) -> None:
        """`is_replaced`: whether `open` waits for another gateway when this one is gone, as in `MeshClient`."""
        self._gateway = MeshClient("gateway", [gateway], is_replaced=is_replaced)
        self._call = self._gateway.ranks[0].call

    def replace(self, actors: Sequence[Any]) -> None:
        self._gateway.replace(actors)

    async def open(self, request: RolloutRequest) -> Endpoint:
        return await self._gateway.retry_on_replacement(lambda: self._call(None, Gateway.open_rollout, request))

    async def idle(self, session_id: str, seconds: float) -> None:
        await self._of_session(session_id, self._call(None, Gateway.idle, session_id, seconds))

    async def close(self, session_id: str) -> Trajectory:
        return await self._of_session(session_id, self._call(None, Gateway.close_rollout, session_id))

    async def _of_session(self, session_id: str, call: Awaitable[T]) -> T:
        try:
            return await call
        except (ActorGone, RolloutOver) as error:  # it was opened at a gateway before this one
            raise GatewayGone(f"rollout {session_id} was lost with its gateway: {error}") from error
        except RequestLost as error:
            raise ActorGone(f"rollout {session_id} was lost: {error}") from error
