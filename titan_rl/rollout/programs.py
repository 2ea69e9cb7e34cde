"""Rollouts that programs of the environment play, each in a session of its own at the gateway.

However a program's rollout ends (it returns, fails, is idle or is cancelled), its session is closed exactly once, its
process is gone, and its sampled turns are kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from titan_rl.errors import GeneratorFailed, RequestError, TaskTimeout
from titan_rl.isolation.pool import UserCodePool
from titan_rl.rollout.trajectory import RolloutRequest, Trajectory
from titan_rl.types import Endpoint

logger = logging.getLogger(__name__)


class RolloutGateway(Protocol):
    """The gateway's interface for rollout workers."""

    async def open(self, request: RolloutRequest) -> Endpoint:
        """Open a session; returns the policy's address and the session's key, for the program."""
        ...

    async def idle(self, session_id: str, seconds: float) -> None:
        """Return once the session has had no open call for `seconds`, counted from its opening if it never had one."""
        ...

    async def close(self, session_id: str) -> Trajectory:
        """Close the session: abort its open calls and refuse its key from now on.

        Raises:
            RequestLost, ActorGone: the rollout is lost and is to be played again.
        """
        ...


class Programs:
    """Runs the programs of one worker's rollouts."""

    def __init__(self, pool: UserCodePool, gateway: RolloutGateway, *, idle_seconds: float):
        self._pool = pool
        self._gateway = gateway
        self._idle_seconds = idle_seconds
        self._sessions: set[asyncio.Task[bytes | None]] = set()

    async def close(self) -> None:
        """Wait until all sessions are closed. The programs have already been ended."""
        if self._sessions:
            await asyncio.wait(self._sessions)

    async def run(self, request: RolloutRequest, on_closed: Callable[[Trajectory], None]) -> bytes | None:
        """Run the environment's `play` for the request's prompt in its own session.

        A cancellation ends the program; this returns once the session is closed.

        Args:
            on_closed: called once with the session's trajectory, unless the session could not be opened or closed.

        Returns:
            The program's pickled state; None if it returned None.

        Raises:
            TaskError: the program failed, or was idle for too long.
            RequestError: the gateway could not read an answer.
            GeneratorFailed: an engine failed a call.
            TitanError: the gateway raised it.
        """
        abandoned = asyncio.Event()
        session = asyncio.create_task(
            self._session(request, on_closed, abandoned), name=f"session {request.session_id}"
        )
        self._sessions.add(session)
        session.add_done_callback(self._sessions.discard)
        try:
            return await asyncio.shield(session)
        except asyncio.CancelledError:
            abandoned.set()
            session.add_done_callback(_log_failure)  # nobody else will
            await asyncio.wait([session])
            raise

    async def _session(
        self, request: RolloutRequest, on_closed: Callable[[Trajectory], None], abandoned: asyncio.Event
    ) -> bytes | None:
        """This task is never cancelled: that could lose the trajectory."""
        endpoint = await self._gateway.open(request)
        started = asyncio.Event()
        group = request.group
        program = asyncio.ensure_future(self._pool.run_program(group.purpose, group.group_id, endpoint, started))
        idle = asyncio.ensure_future(self._idle(request.session_id, started))
        left = asyncio.ensure_future(abandoned.wait())
        try:
            await asyncio.wait((program, idle, left), return_when=asyncio.FIRST_COMPLETED)
            if program.done():
                return program.result()
            if idle.done():
                idle.result()
                raise TaskTimeout(f"its program neither asked nor returned for {self._idle_seconds:g} s and was ended")
            return None
        finally:
            for each in (program, idle, left):
                each.cancel()
            await asyncio.gather(program, idle, left, return_exceptions=True)
            on_closed(trajectory := await self._gateway.close(request.session_id))
            if trajectory.failure:
                raise GeneratorFailed(f"{group} sample {request.sample}: {trajectory.failure}")
            if trajectory.misread:  # whatever the program made of it
                raise RequestError(f"the gateway could not read an answer, which is a bug: {trajectory.misread}")

    async def _idle(self, session_id: str, started: asyncio.Event) -> None:
        """Returns when the program was idle for too long, not counting the wait for its process."""
        opened = time.monotonic()
        await started.wait()
        await self._gateway.idle(session_id, self._idle_seconds + time.monotonic() - opened)


def _log_failure(session: asyncio.Task[bytes | None]) -> None:
    if not session.cancelled() and (error := session.exception()) is not None:
        logger.warning("%s, which was abandoned: %s", session.get_name(), error)
