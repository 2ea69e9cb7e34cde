"""`GatewaySessions`: the sessions of a `Gateway`, as rollout workers see them; loads no server."""

from __future__ import annotations

from typing import Any

from titan_rl.actors.connection import Connection
from titan_rl.rollout.session import SessionRecord, SessionRequest
from titan_rl.types import Endpoint


class GatewaySessions:
    """A `Sessions`."""

    def __init__(self, gateway: Any, *, seconds: float) -> None:
        """
        Args:
            gateway: handle of the actor.
            seconds: bound on any one call but `idle`, which ends when the session does.
        """
        self._gateway = Connection(gateway, what="gateway.{}")
        self._seconds = seconds

    async def open(self, request: SessionRequest) -> Endpoint:
        return await self._gateway.call("open_session", request, seconds=self._seconds)

    async def idle(self, session_id: str, seconds: float) -> None:
        await self._gateway.call("idle", session_id, seconds, seconds=None)

    async def close(self, session_id: str) -> SessionRecord:
        return await self._gateway.call("close_session", session_id, seconds=self._seconds)
