"""The host of an environment and the processes forked from it, as objects in the rollout worker.

- The host has its own session and dies with the thread that spawned it. The first frame to it names the environment to
  make; its first frame back describes that environment, or says why it could not be made.
- Every fork ends: its `ended` is set once the fork and all processes that it started are gone and all its answers have
  been read. If the host dies, its forks do too.
- After `stop` the host and all its forks are gone and reaped, and all descriptors are closed.
- Their output goes to this module's logger line by line, control characters as escapes. Output of user code cannot get
  into the protocol. A process that writes anything but its messages into its socket is killed.
- Everything that is asked of the host goes through one queue: in order, in whole frames, and as fast as it forks.
  However many processes are asked for at once, each waits for its turn, and no kill is lost.
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
from collections import deque
from collections.abc import Callable
from pathlib import Path

from titan_rl.errors import AbsentError, ConfigError, TaskError
from titan_rl.one_line import escaped
from titan_rl.processes import answering, ending_in_words
from titan_rl.sandbox.variables import passed_on
from titan_rl.sandbox.wire import (
    LARGEST_ANSWER,
    Answer,
    BadFrame,
    Call,
    EnvironmentSetup,
    Fork,
    Forked,
    Frames,
    Kill,
    Made,
    TaskInfo,
    pack_order,
    read_answer,
    read_forked,
    read_made,
)

STOP_SECONDS = 10.0
"""How long a host may take to end all its forks once its socket is closed. It runs no user code, so it is quick."""
KILL_SECONDS = 30.0
"""How long a host may take to make or end one fork, once it has made those that were asked for before. A host that
takes longer is stuck: it is killed, so that no call waits for ever."""
STARTS_AT_ONCE = 64
"""Processes that the host is asked for at a time. The others wait without the descriptors that each takes here."""
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


class ForkedProcess(asyncio.Protocol):
    """A process that answers calls of user code; as a protocol, this process's end of its socket."""

    def __init__(self, kill: Callable[[int], None]):
        self.number = -1
        self._kill = kill
        self._frames: Frames[Answer | None] = Frames(read_answer, LARGEST_ANSWER)
        self._wrong = ""
        self._how = ""
        self._lost = False
        self.lost_host = False
        """Whether it ended because its host died."""
        self.transport: asyncio.WriteTransport
        self.on_answers: Callable[[list[Answer | None]], None] = lambda answers: None
        """Called with answers. A None among them ends a list of calls that ran one after the other."""
        self.started = asyncio.Event()
        """Set when the host has forked it, or could not."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How the process ended, in words."""

    def send(self, calls: list[tuple[int, Call]]) -> None:
        """Send numbered calls to be answered."""
        self.transport.write(pack_order(calls))

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        self._kill(self.number)

    def data_received(self, data: bytes) -> None:
        try:
            answers = self._frames.feed(data)
        except BadFrame as error:
            self._wrong = f"wrote what is no answer ({escaped(str(error))}) and "
            self.transport.abort()
            self.kill()
            return
        if answers:
            self.on_answers(answers)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._end()

    def process_ended(self, how: str) -> None:
        self._how = self._wrong + how
        self.started.set()
        # if the keeper was killed, processes of user code may hold the socket open: do not wait for its end of stream
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self.transport.abort)
        self._end()

    def _end(self) -> None:
        if self._lost and self._how and not self.ended.done():
            self.ended.set_result(self._how)


class HostGone(TaskError):
    """The host of an environment has died: no fault of the call that a process of it was doing."""


class _Orders:
    """Frames and descriptors that wait to be read by the host: its socket takes a few hundred of them at a time."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[bytes, socket.socket | None]] = deque()

    def put(self, frame: bytes, descriptor: socket.socket | None = None) -> None:
        """Send a frame, and with it a socket, which is closed here then."""
        self._waiting.append((frame, descriptor))
        if len(self._waiting) == 1:
            self._loop.add_writer(self._socket, self._send)

    def close(self) -> None:
        self._loop.remove_writer(self._socket)
        for _, descriptor in self._waiting:
            if descriptor is not None:
                descriptor.close()
        self._waiting.clear()

    def _send(self) -> None:
        while self._waiting:
            frame, descriptor = self._waiting[0]
            try:
                sent = socket.send_fds(self._socket, [frame], [descriptor.fileno()] if descriptor is not None else [])
            except BlockingIOError:
                return
            except OSError:  # the host has ended, which its pidfd tells
                break
            if descriptor is not None:
                descriptor.close()
            self._waiting.popleft()
            if sent < len(frame):
                self._waiting.appendleft((frame[sent:], None))
        self.close()


class HostProcess:
    """One process of an environment's host; a restart makes a new object."""

    def __init__(self, setup: EnvironmentSetup):
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._output_ended = asyncio.Event()
        self._said: asyncio.Future[Made] = self._loop.create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self._forks: dict[int, ForkedProcess] = {}
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._newest = self._newest_told = -1  # numbers: of the last fork that was asked for, and that it spoke of
        self._closed = False

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
                self._orders.put(pack_order((sys.path, self._setup)))
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
        if said.info is not None:
            return said.info
        await self.stop()
        refusal = escaped(said.refusal, keep="\n")
        if said.kind == "task":
            raise TaskError(f"environment {name!r} could not be made: {refusal}")
        raise (AbsentError if said.kind == "absent" else ConfigError)(refusal)

    async def fork(self) -> ForkedProcess:
        """A new process for user code. Waits for its turn.

        Raises:
            TaskError: the host has ended, or there is no descriptor for the process.
        """
        async with self._starts:
            ours, theirs = await self._socket_pair()
            fork = ForkedProcess(self._kill_fork)
            fork.transport, _ = await self._loop.create_unix_connection(lambda: fork, sock=ours)
            if self.exited or self._closed:
                theirs.close()
                fork.transport.abort()
                raise HostGone(f"the process that it is forked from {self._ending()}")
            self._newest = fork.number = next(self._numbers)
            self._forks[fork.number] = fork
            self._orders.put(pack_order(Fork(fork.number)), theirs)
            self._watch(fork.started.is_set)
            try:
                await fork.started.wait()
            except asyncio.CancelledError:
                fork.kill()
                raise
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
        self._close()
        if not patient:
            self._kill()
        if not await _happens(self._exited, STOP_SECONDS):
            self._kill()
            if not await _happens(self._exited, REAP_SECONDS):
                logger.error("the process %d of an environment was killed and does not end", self._process.pid)
        await _happens(self._output_ended, DRAIN_SECONDS)
        self._output.close()

    async def _spawn(self) -> None:
        output, child_output = os.pipe()
        # all awaits come before the process exists, so that a cancellation leaves no process
        self._output, _ = await self._loop.connect_read_pipe(
            lambda: _LogLines(self._output_ended), os.fdopen(output, "rb")
        )
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._orders, self._frames = _Orders(self._socket), Frames(self._hear, LARGEST_ANSWER)
        self._loop.add_reader(self._socket, self._receive)
        package_root = str(Path(__file__).resolve().parents[2])
        # sets of strings are iterated in hash order, and a restarted process has to draw the same examples
        passed = passed_on(os.environ, self._setup.variables)
        if withheld := sorted(os.environ.keys() - passed.keys()):
            logger.info(
                "environment %s does not see these variables, unless environment.variables names them: %s",
                self._setup.name,
                escaped(" ".join(withheld)),
            )
        environment = {"PYTHONHASHSEED": "0", **passed, "PYTHONUNBUFFERED": "1"}
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
            self._close()
            self._output.close()
            raise
        finally:
            theirs.close()
            os.close(child_output)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        try:
            self._frames.feed(data)
        except BadFrame as error:
            logger.error("the host %s of an environment wrote what is no message and is killed: %s", self.pid, error)
            self._close()
            self._kill()

    def _hear(self, body: bytes) -> None:
        if not self._said.done():
            self._said.set_result(read_made(body))
            answering.add(self._pidfd)
            return
        told: Forked = read_forked(body)
        self._newest_told = max(self._newest_told, told.number)
        if (fork := self._forks.get(told.number)) is None:
            return
        if told.ended:
            del self._forks[told.number]
            fork.process_ended(told.ended)
        else:
            fork.started.set()

    def _close(self) -> None:
        """Close the socket, which ends the host and all forks."""
        if self._closed:
            return
        self._closed = True
        self._orders.close()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if not self._said.done():
            self._said.set_exception(ConnectionError("closed"))
            self._said.exception()  # marked as retrieved, because nobody may be waiting for it

    def _kill_fork(self, number: int) -> None:
        if number in self._forks and not self._closed:
            self._orders.put(pack_order(Kill(number)))
            self._watch(lambda: number not in self._forks)

    def _watch(self, done: Callable[[], bool]) -> None:
        """Kill the host if what it was just asked for is not done in time."""
        self._loop.call_later(KILL_SECONDS, self._give_up, done, self._newest, self._newest_told)

    def _give_up(self, done: Callable[[], bool], before: int, told: int) -> None:
        """Kill the host if this is not done, unless it was and is busy with the forks before, up to number `before`: it
        had made those up to `told`, and has made more since."""
        if self.exited or done():
            return
        if told < before and told < self._newest_told:
            self._loop.call_later(KILL_SECONDS, self._give_up, done, before, self._newest_told)
            return
        logger.error("the host %s of an environment neither makes nor ends a process and is killed", self.pid)
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
        self._loop.call_later(DRAIN_SECONDS, self._close)


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
            self._log(line)

    def _log(self, line: bytes) -> None:
        logger.info("%s", escaped(line.decode(errors="replace"), keep="\t"))

    def _say_dropped(self) -> None:
        if self._dropped:
            logger.warning("%d bytes of output were not logged: user code printed too much", self._dropped)
        self._dropped = 0

    def connection_lost(self, error: Exception | None) -> None:
        self._say_dropped()
        if self._rest:
            self._log(self._rest)
        self._ended.set()
