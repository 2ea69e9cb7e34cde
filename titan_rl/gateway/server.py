"""The gateway's HTTP server: it listens, serves the app, and answers what is open when it is closed."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from titan_rl.errors import ActorFailed, ConfigError
from titan_rl.gateway.access.callers import ApiKeys
from titan_rl.gateway.access.middleware import BoundedFraming
from titan_rl.gateway.access.rollout_keys import RolloutKeys
from titan_rl.gateway.app import build_app
from titan_rl.gateway.calls import Fleet, ServedPolicy
from titan_rl.gateway.config import GatewayConfig

BACKLOG = 2048
"""Connections that may wait to be accepted."""
IDLE_SECONDS = 75
"""A connection without a call stays open so long: agents think, and run tools, between two calls."""
CLOSE_SECONDS = 1
"""Calls that are open when the server is closed may take so long to finish; then they are cut off and aborted."""


class GatewayServer:
    """Runs in the event loop in which it is made, from then on."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, policy: ServedPolicy, *, run_seed: int) -> None:
        """
        Args:
            run_seed: the run's seed; only sessions sample by it.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        listener = _listen(config.host, config.port)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        """Without `/v1`."""
        self.keys = (
            RolloutKeys(policy, base_url=f"{self.url}/v1", run_seed=run_seed)
            if config.sessions
            else ApiKeys(policy, config.api_key)
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_app(config, fleet, policy, self.keys),
                http=BoundedFraming,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        self._running = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))

    @property
    def sessions(self) -> RolloutKeys:
        """Where `GatewayConfig.sessions` is on."""
        assert isinstance(self.keys, RolloutKeys)
        return self.keys

    async def ended(self) -> None:
        """Returns when the server was closed. Raises ActorFailed when it ended by itself."""
        await asyncio.wait([self._running])
        if not self._server.should_exit:
            error = None if self._running.cancelled() else self._running.exception()
            raise ActorFailed(f"the HTTP server ended by itself: {error or 'no error'}")

    async def close(self) -> None:
        """Take no more calls, end all sessions, and abort what is open; clients are told so."""
        self.keys.end_all()
        self._server.should_exit = True
        await asyncio.wait([self._running])


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        both = family == socket.AF_INET6
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
