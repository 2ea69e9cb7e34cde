"""The host of an environment and the processes forked from it, as objects in the rollout worker.

- The host has its own session and dies with the thread that spawned it. The first frame to it names the environment to
  make; its first frame back describes that environment, or says why it could not be made.
- Every fork ends: its `ended` is set once the fork and all processes that it started are gone and all its answers have
  been read. If the host dies, its forks do too.
- After `stop` the host and all its forks are gone and reaped, and all descriptors are closed.
- Their output goes to this module's logger line by line. Output of user code cannot get into the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_rl.errors import ConfigError, TaskError
from titan_rl.processes import answering, ending_in_words
from titan_rl.sandbox.wire import Answer, Call, Ended, EnvironmentSetup, Fork, Frames, Kill, TaskInfo, pack_frame

STOP_SECONDS = 10.0
"""How long a host may take to end all its forks once its socket is closed. It runs no user code, so it is quick."""
KILL_SECONDS = 30.0
"""How long a host may take to end one fork. A host that takes longer is stuck: it is killed, so that no call waits for
ever."""
REAP_SECONDS = 10.0
"""How long the kernel may take to end a killed process."""
DRAIN_SECONDS = 2.0
"""How long to wait for remaining output if another process holds the other end open."""
DESCRIPTOR_SECONDS = 60.0
"""How long a process waits to be forked when its worker has used up its file descriptors."""
_DESCRIPTOR_PAUSE = 1.0
MAX_LOG_LINE = 4096
"""Longer lines of output are logged in pieces."""
LOG_SECONDS, LOG_BYTES = 10.0, 1 << 20
"""So many bytes of output are logged in so many seconds; the rest is counted: endless output would fill the disk."""

logger = logging.getLogger(__name__)


class _Connection(asyncio.Protocol):
    """Frames from one socket."""

    def __init__(self, on_messages: Callable[[list[Any]], None], on_lost: Callable[[], None]):
        self._frames = Frames()
        self._on_messages = on_messages
        self._on_lost = on_lost

    def data_received(self, data: bytes) -> None:
        if messages := self._frames.feed(data):
            self._on_messages(messages)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()


class ForkedProcess:
    """A process that answers calls of user code."""

    def __init__(self, number: int, kill: Callable[[int], None]):
        self._number = number
        self._kill = kill
        self._how = ""
        self._lost = False
        self.lost_host = False
        """Whether it ended because its host died."""
        self.transport: asyncio.WriteTransport
        self.on_answers: Callable[[list[Answer | None]], None] = lambda answers: None
        """Called with answers. A None among them ends a list of calls that ran one after the other."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How the process ended, in words."""

    def send(self, calls: list[tuple[int, Call]]) -> None:
        """Send numbered calls to be answered."""
        self.transport.write(pack_frame(calls))

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        self._kill(self._number)

    def connection_lost(self) -> None:
        self._lost = True
        self._end()

    def process_ended(self, how: str) -> None:
        self._how = how
        # if the keeper was killed, processes of user code may hold the socket open: do not wait for its end of stream
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self.transport.abort)
        self._end()

    def _end(self) -> None:
        if self._lost and self._how and not self.ended.done():
            self.ended.set_result(self._how)


class HostGone(TaskError):
    """The host of an environment has died: no fault of the call that a process of it was doing."""


class HostProcess:
    """One process of an environment's host; a restart makes a new object."""

    def __init__(self, setup: EnvironmentSetup):
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._output_ended = asyncio.Event()
        self._said: asyncio.Future[Any] = self._loop.create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self._forks: dict[int, ForkedProcess] = {}

    @property
    def pid(self) -> int | None:
        """None before it was spawned."""
        return self._process.pid if self._process else None

    @property
    def exited(self) -> bool:
        return self._exited.is_set()

    async def start(self) -> TaskInfo:
        """Spawn the host and wait until it has made its environment. If that fails, the host is stopped.

        Raises:
            ConfigError: the environment refused its arguments.
            TaskError: the environment could not be imported or made, or not within `start_seconds`.
        """
        name, seconds = self._setup.name, self._setup.start_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._spawn()
                self._transport.write(pack_frame((sys.path, self._setup)))
                said = await self._said
        except TimeoutError:
            await self.stop(patient=False)
            raise TaskError(f"environment {name!r} was not ready within {seconds:g} s") from None
        except OSError:
            await self.stop()
            raise TaskError(f"the process of environment {name!r} {self._ending()} while starting") from None
        except BaseException:
            await self.stop(patient=False)
            raise
        if isinstance(said, TaskInfo):
            return said
        await self.stop()
        raise said if isinstance(said, ConfigError) else TaskError(f"environment {name!r} could not be made: {said}")

    async def fork(self) -> ForkedProcess:
        """A new process for user code.

        Raises:
            TaskError: the host has ended, or there is no descriptor for the process.
        """
        ours, theirs = await self._socket_pair()
        number = next(self._numbers)
        fork = ForkedProcess(number, self._kill_fork)
        fork.transport, _ = await self._loop.create_unix_connection(
            lambda: _Connection(lambda answers: fork.on_answers(answers), fork.connection_lost), sock=ours
        )
        with theirs:
            if self.exited:
                fork.transport.abort()
                raise HostGone(f"the process that it is forked from {self._ending()}")
            try:
                socket.send_fds(self._socket, [pack_frame(Fork(number))], [theirs.fileno()])
            except OSError as error:
                fork.transport.abort()
                raise TaskError(f"no process can be made for it: {error}") from error
            self._forks[number] = fork
        return fork

    async def _socket_pair(self) -> tuple[socket.socket, socket.socket]:
        """Waits while this process may open no more files: that is no fault of the user code."""
        until = time.monotonic() + DESCRIPTOR_SECONDS
        while True:
            try:
                return socket.socketpair()
            except OSError as error:
                if time.monotonic() > until:
                    raise TaskError(f"no process can be made for it: {error}") from error
                logger.warning("a process of user code waits: %s", error)
            await asyncio.sleep(_DESCRIPTOR_PAUSE)

    async def stop(self, *, patient: bool = True) -> None:
        """End the host by closing its socket. It is killed if it does not end in time, or if `patient` is False. May be
        called again."""
        if self._process is None:
            return
        self._transport.abort()
        if not patient:
            self._kill()
        if not await _happens(self._exited, STOP_SECONDS):
            self._kill()
            if not await _happens(self._exited, REAP_SECONDS):
                logger.error("the process %d of an environment was killed and does not end", self._process.pid)
        await _happens(self._output_ended, DRAIN_SECONDS)
        self._output.close()

    async def _spawn(self) -> None:
        self._socket, theirs = socket.socketpair()
        output, child_output = os.pipe()
        # all awaits come before the process exists, so that a cancellation leaves no process
        self._transport, _ = await self._loop.create_unix_connection(
            lambda: _Connection(self._hear, self._connection_lost), sock=self._socket
        )
        self._output, _ = await self._loop.connect_read_pipe(
            lambda: _LogLines(self._output_ended), os.fdopen(output, "rb")
        )
        package_root = str(Path(__file__).resolve().parents[2])
        # sets of strings are iterated in hash order, and a restarted process has to draw the same examples
        environment = {"PYTHONHASHSEED": "0", **os.environ, "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        try:
            # not in a helper thread: the host dies with the thread that spawns it
            self._process = subprocess.Popen(
                [sys.executable, "-m", "titan_rl.sandbox.host", str(theirs.fileno()), str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=child_output,
                stderr=child_output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C does not reach it, and a kill of the group also kills its children
            )
        except OSError:
            self._transport.abort()
            self._output.close()
            raise
        finally:
            theirs.close()
            os.close(child_output)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def _hear(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Ended):
                self._forks.pop(message.number).process_ended(message.how)
            elif not self._said.done():
                self._said.set_result(message)
                answering.add(self._pidfd)

    def _connection_lost(self) -> None:
        if not self._said.done():
            self._said.set_exception(ConnectionError("closed"))
            self._said.exception()  # marked as retrieved, because nobody may be waiting for it

    def _kill_fork(self, number: int) -> None:
        if number in self._forks and not self.exited:
            with contextlib.suppress(OSError):  # the host is being stopped, and its forks with it
                self._socket.sendall(pack_frame(Kill(number)))
            self._loop.call_later(KILL_SECONDS, self._give_up, number)

    def _give_up(self, number: int) -> None:
        """Kill the host if it has not ended a fork that it was told to end."""
        if number in self._forks and not self.exited:
            logger.error("the host %s of an environment does not end a process and is killed", self.pid)
            self._kill()

    def _kill(self) -> None:
        """Kill the host and its process group, if it has not ended."""
        if self._process is not None and not self.exited:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ending(self) -> str:
        """How it ended, in words."""
        status = self._process.returncode if self._process else None
        return "closed its connection" if status is None else ending_in_words(status)

    def _reap(self) -> None:
        """Called once, when the host has ended."""
        assert self._process is not None
        self._loop.remove_reader(self._pidfd)
        answering.discard(self._pidfd)
        os.close(self._pidfd)
        # its id cannot be reused before it is reaped; this also kills processes that user code started in the host
        self._kill()
        self._process.wait()
        self._exited.set()
        while self._forks:
            _, fork = self._forks.popitem()
            fork.lost_host = True
            fork.process_ended(f"ended: the process that it was forked from {self._ending()}")
        # a process that user code started may hold the socket open: do not wait for its end of stream
        self._loop.call_later(DRAIN_SECONDS, self._transport.abort)


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


class _LogLines(asyncio.Protocol):
    """Logs what is printed."""

    def __init__(self, ended: asyncio.Event):
        self._ended = ended
        self._rest = b""
        self._since = 0.0
        self._logged = self._dropped = 0  # bytes since then

    def data_received(self, data: bytes) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._since + LOG_SECONDS:
            self._say_dropped()
            self._since, self._logged = now, 0
        if self._logged >= LOG_BYTES:
            self._dropped += len(data)
            return
        self._logged += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LOG_LINE:
            lines.append(self._rest[:MAX_LOG_LINE])
            self._rest = self._rest[MAX_LOG_LINE:]
        for line in lines:
            logger.info("%s", line.decode(errors="replace"))

    def _say_dropped(self) -> None:
        if self._dropped:
            logger.warning("%d bytes of output were not logged: user code printed too much", self._dropped)
        self._dropped = 0

    def connection_lost(self, error: Exception | None) -> None:
        self._say_dropped()
        if self._rest:
            logger.info("%s", self._rest.decode(errors="replace"))
        self._ended.set()
