"""Programs behind one door: a rollout goes in, a state or a `TaskError` comes out, whatever the program does.

- Every play ends: by itself, by the cancellation of whoever waits for it, or with its host; whichever it is, nothing
  that it started is left.
- If the host dies, every running play fails, and the next one starts a new host.
- There is no time limit here: who waits for a play knows whether it makes progress.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

from titan_rl.errors import TaskError
from titan_rl.sandbox.environment_wire import EnvironmentSetup
from titan_rl.sandbox.play_wire import Ended, Kill, Start
from titan_rl.sandbox.spawned_process import SpawnedProcess
from titan_rl.types import Endpoint, Purpose

STOP_SECONDS = 10.0
"""What a host may take to end all plays once its socket is closed. It runs no user code, so it always does, and soon;
past this its keepers are told by the kernel."""

logger = logging.getLogger(__name__)


class PlayProcess:
    """Keeps a process that programs are forked from, and starts it anew when it dies."""

    def __init__(self, setup: EnvironmentSetup):
        self._setup = setup
        self._host: _Host | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self.restarts = 0

    async def start(self) -> None:
        """Start the host and make the environment in it.

        Raises:
            TaskError: that failed; says why.
        """
        self._host = await _Host.start(self._setup)

    @property
    def pid(self) -> int | None:
        """Process id of the host, while there is one."""
        return self._host.pid if self._host is not None else None

    async def play(self, purpose: Purpose, index: int, endpoint: Endpoint) -> bytes | None:
        """Run the environment's `play` for prompt `index`; its pickled state, None where it returned None.

        A cancellation ends the play.

        Raises:
            TaskError: it raised, or ended in another way than by returning; or this object is closed.
        """
        try:
            return await (await self._living_host()).play(purpose, index, endpoint)
        except TaskError as error:
            raise TaskError(f"{self._setup.name}: play of {purpose} prompt {index}: {error}") from None

    async def close(self) -> None:
        """End all plays and the host; who waits for a play is told so."""
        self._closed = True
        async with self._starting:
            host, self._host = self._host, None
        if host is not None:
            await host.close()

    async def _living_host(self) -> _Host:
        async with self._starting:
            if self._closed or self._host is None:
                raise TaskError("closed" if self._closed else "not started")
            if self._host.failed:
                await self._host.close()
                self.restarts += 1
                self._host = await _Host.start(self._setup)
            return self._host


class _Host:
    """One life of the host."""

    def __init__(self, process: SpawnedProcess, name: str):
        self._process = process
        self._name = name
        self._numbers = itertools.count()
        self._running: dict[int, asyncio.Future[bytes | None]] = {}
        self.failed = ""
        self._listener = asyncio.create_task(self._listen(), name=f"programs of environment {name}")
        self._listener.add_done_callback(self._listener_ended)

    @staticmethod
    async def start(setup: EnvironmentSetup) -> _Host:
        process = SpawnedProcess("titan_rl.sandbox.play_host", stop_seconds=STOP_SECONDS)
        await process.make_environment(setup)
        return _Host(process, setup.name)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def play(self, purpose: Purpose, index: int, endpoint: Endpoint) -> bytes | None:
        if self.failed:
            raise TaskError(self.failed)
        number = next(self._numbers)
        ended = self._running[number] = asyncio.get_running_loop().create_future()
        self._process.send(Start(number, purpose, index, endpoint))
        try:
            return await ended
        except asyncio.CancelledError:
            if not self.failed:
                self._process.send(Kill(number))
            raise

    async def close(self) -> None:
        self._fail("closed")
        self._listener.cancel()
        await asyncio.wait([self._listener])
        await self._process.stop()

    async def _listen(self) -> None:
        """Consumes what the host says; waits for it; produces the ends of plays; on failure, `_fail`s all of them."""
        try:
            while True:
                told: Ended = await self._process.receive()
                self._end(told)
        except (EOFError, OSError):
            await self._process.stop()
            self._fail(f"the process that it was forked from {self._process.ending()}")
            logger.warning("environment %s: %s; the next play starts a new one", self._name, self.failed)

    def _end(self, told: Ended) -> None:
        ended = self._running.pop(told.number)
        if ended.done():  # whoever waited has gone
            return
        if told.error:
            ended.set_exception(TaskError(told.error))
        else:
            ended.set_result(told.state)

    def _fail(self, reason: str) -> None:
        self.failed = self.failed or reason
        for ended in self._running.values():
            if not ended.done():
                ended.set_exception(TaskError(self.failed))
        self._running.clear()

    def _listener_ended(self, listener: asyncio.Task[None]) -> None:
        if not listener.cancelled() and (error := listener.exception()) is not None:
            logger.error("the listener to the programs of environment %s crashed", self._name, exc_info=error)
            self._fail(f"its listener crashed: {error!r}")
