"""`Gateway`: the HTTP server in front of a router, in a process of its own.

The process loads neither torch nor vLLM. Its only TCP port speaks HTTP and JSON; pickles travel on Monarch's own
channels, which no client of the gateway has.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn

from titan_rl.actors.calls import served
from titan_rl.actors.connection import ConnectedActor, Connection
from titan_rl.actors.router_client import GeneratorStatus
from titan_rl.actors.transport import CompletionClient
from titan_rl.chat.renderer import Renderer, make_renderer
from titan_rl.errors import ActorFailed, ConfigError
from titan_rl.gateway.access.callers import Door, SharedKey
from titan_rl.gateway.access.limits import BoundedFraming
from titan_rl.gateway.access.rollout_keys import SessionKeys
from titan_rl.gateway.app import build_app
from titan_rl.gateway.config import GatewayConfig
from titan_rl.rollout.session import SessionRecord, SessionRequest
from titan_rl.types import Completion, Endpoint, GenerationRequest, Piece

BACKLOG = 2048
"""Connections that may wait to be accepted."""
IDLE_SECONDS = 75
"""A connection without a call stays open so long: agents think, and run tools, between two calls."""
STATUS_SECONDS = 20.0
"""Bound on the router's answer about its fleet."""
CLOSE_SECONDS = 1
"""Calls that are open when the server is closed may take so long to finish; then they are cut off and aborted."""


class Gateway(ConnectedActor):
    """Endpoints: `setup`, `serve`, `open_session`, `idle`, `close_session`, `close`."""

    def __init__(
        self,
        config: GatewayConfig,
        router: Any,
        *,
        model_path: str,
        renderer: str,
        renderer_kwargs: dict[str, Any],
        max_model_len: int,
        run_seed: int = 0,
    ) -> None:
        """
        Args:
            router: handle of a `GeneratorRouter`.
            model_path: directory with the tokenizer of what the fleet serves.
            renderer, renderer_kwargs: as in `RolloutConfig`.
            max_model_len: of the generators.
            run_seed: the run's seed; only sessions sample by it.
        """
        self._config = config
        self._router = router
        self._model_path = model_path
        self._renderer = (renderer, renderer_kwargs)
        self._max_model_len = max_model_len
        self._run_seed = run_seed
        self._fleet: _RouterFleet | None = None
        self._door: Door | None = None
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task[None] | None = None

    @served
    async def setup(self) -> tuple[int, str]:
        """Listen. Returns this process's id and the URL, without `/v1`.

        Raises:
            ConfigError: the address cannot be listened on, or there is no renderer for the checkpoint.
        """
        name, settings = self._renderer
        renderer = make_renderer(name, self._model_path, settings)
        listener = _listen(self._config)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._fleet = _RouterFleet(self._router)
        self._door = self._make_door(renderer, url)
        app = build_app(self._config, self._fleet, renderer, self._door, max_model_len=self._max_model_len)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=BoundedFraming,
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        self._running = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))
        return os.getpid(), url

    @served
    async def serve(self) -> None:
        """Stays open for as long as the server runs: the failure channel.

        Raises:
            ActorFailed: the server ended by itself.
        """
        if self._running is None or self._server is None:
            raise ActorFailed("the gateway was called before setup")
        await asyncio.wait([self._running])
        if not self._server.should_exit:
            error = None if self._running.cancelled() else self._running.exception()
            raise ActorFailed(f"the HTTP server ended by itself: {error or 'no error'}")

    @served
    async def open_session(self, request: SessionRequest) -> Endpoint:
        """See `Sessions`."""
        return await self._open_sessions().open(request)

    @served
    async def idle(self, session_id: str, seconds: float) -> None:
        """See `Sessions`; stays open until then."""
        await self._open_sessions().idle(session_id, seconds)

    @served
    async def close_session(self, session_id: str) -> SessionRecord:
        """See `Sessions`."""
        record = await self._open_sessions().close(session_id)
        if self._fleet is not None:
            self._fleet.end_session(session_id)
        return record

    @served
    async def close(self) -> None:
        """Take no more calls, end all sessions, and abort what is open; clients are told so."""
        if self._door is not None:
            self._door.close_all()
        if self._server is not None and self._running is not None:
            self._server.should_exit = True
            await asyncio.wait([self._running])
        if self._fleet is not None:
            await self._fleet.close()

    def _make_door(self, renderer: Renderer, url: str) -> Door:
        if not self._config.sessions:
            return SharedKey(self._config.api_key, renderer, max_model_len=self._max_model_len)
        return SessionKeys(
            renderer,
            base_url=f"{url}/v1",
            model=self._config.model,
            run_seed=self._run_seed,
            max_model_len=self._max_model_len,
        )

    def _open_sessions(self) -> SessionKeys:
        if not isinstance(self._door, SessionKeys):
            raise ActorFailed("the gateway was called before setup, or has no sessions")
        return self._door


class _RouterFleet:
    """The router, as the app sees it."""

    def __init__(self, router: Any) -> None:
        self._router = Connection(router, what="router.{}")
        self._completions = CompletionClient(router, name="router")

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self._completions.generate(request)

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
        return self._completions.stream(request)

    def end_session(self, session_id: str) -> None:
        self._completions.end_sessions([session_id])

    async def fleet_status(self) -> list[GeneratorStatus]:
        return await self._router.call("fleet_status", seconds=STATUS_SECONDS)

    async def close(self) -> None:
        await self._completions.close()


def _listen(config: GatewayConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}, port {config.port}: {error.strerror or error}") from error
    return listener
