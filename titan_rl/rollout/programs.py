"""Rollouts that a program of the environment plays: a session at the gateway, and a process that talks to it.

- However a rollout ends (the program returns, fails, is idle or is cancelled), its session is closed exactly once, its
  process is gone, and its sampled turns are kept.
- Time in which the policy works on a call does not count. A program that has no open call and does not return for
  `environment.step_seconds` is killed.
- If an engine failed a call, the rollout ends with GeneratorFailed, even if the program handled the error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from titan_rl.errors import GeneratorFailed, TaskError
from titan_rl.rollout.turns import RolloutGateway, RolloutRecord, RolloutRequest
from titan_rl.sandbox.sandbox import Sandbox
from titan_rl.types import Endpoint

Keep = Callable[[RolloutRecord], None]

logger = logging.getLogger(__name__)


class Programs:
    """Runs the programs of one worker's rollouts."""

    def __init__(self, sandbox: Sandbox, sessions: RolloutGateway, *, idle_seconds: float):
        self._sandbox = sandbox
        self._sessions = sessions
        self._idle_seconds = idle_seconds
        self._running: set[asyncio.Task[bytes | None]] = set()

    async def close(self) -> None:
        """Wait until all sessions are closed. The programs have already been ended."""
        if self._running:
            await asyncio.wait(self._running)

    async def play(self, request: RolloutRequest, keep: Keep) -> bytes | None:
        """Run the environment's `play` for the request's prompt in its own session.

        A cancellation ends the program; this returns once the session is closed.

        Args:
            keep: called once with the session's record, unless the session could not be opened or closed.

        Returns:
            The program's pickled state; None if it returned None.

        Raises:
            TaskError: the program failed, or was idle for too long.
            GeneratorFailed: an engine failed a call.
            TitanError: the gateway raised it.
        """
        abandoned = asyncio.Event()
        session = asyncio.create_task(self._session(request, keep, abandoned), name=f"session {request.session_id}")
        self._running.add(session)
        session.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(session)
        except asyncio.CancelledError:
            abandoned.set()
            session.add_done_callback(_tell_failure)  # nobody else will
            await asyncio.wait([session])
            raise

    async def _session(self, request: RolloutRequest, keep: Keep, abandoned: asyncio.Event) -> bytes | None:
        """Open a session, run the program, close the session. This task is never cancelled: that could lose the
        record."""
        endpoint = await self._sessions.open(request)
        try:
            return await self._until_over(request, endpoint, abandoned)
        finally:
            record = await self._sessions.close(request.session_id)
            keep(record)
            if record.failure:
                raise GeneratorFailed(f"{request.group} sample {request.sample}: {record.failure}")

    async def _until_over(self, request: RolloutRequest, endpoint: Endpoint, abandoned: asyncio.Event) -> bytes | None:
        group = request.group
        playing = asyncio.ensure_future(self._sandbox.play(group.purpose, group.group_id, endpoint))
        idle = asyncio.ensure_future(self._sessions.idle(request.session_id, self._idle_seconds))
        left = asyncio.ensure_future(abandoned.wait())
        try:
            await asyncio.wait((playing, idle, left), return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                return playing.result()
            if idle.done():
                idle.result()
                raise TaskError(f"its program neither asked nor returned for {self._idle_seconds:g} s and was ended")
            return None
        finally:
            for each in (playing, idle, left):
                each.cancel()
            await asyncio.gather(playing, idle, left, return_exceptions=True)


def _tell_failure(session: asyncio.Task[bytes | None]) -> None:
    if not session.cancelled() and (error := session.exception()) is not None:
        logger.warning("%s, which was abandoned: %s", session.get_name(), error)
