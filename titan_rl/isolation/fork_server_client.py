"""The fork server of an environment and the processes forked from it, as objects in the rollout worker.

- The fork server has its own session and dies with the thread that spawned it. The first frame to it names the
  environment to make; its first frame back describes that environment, or says why it could not be made.
- Every fork ends: its `ended` is set once the fork and all processes that it started are gone and all its answers have
  been read. If the fork server dies, its forks are killed.
- After `stop` the fork server and all its forks are gone and reaped, and all descriptors are closed.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import cast

from titan_rl.errors import AbsentError, ActorGone, ConfigError, InfrastructureFailed, TaskError
from titan_rl.isolation.process_io import LogLines, user_variables
from titan_rl.isolation.wire import (
    FORKED,
    LARGEST_RESULT,
    BadFrame,
    CallResult,
    EnvironmentSetup,
    Frames,
    SetupResult,
    TaskInfo,
    read_result,
    read_setup_result,
)
from titan_rl.one_line import escaped
from titan_rl.processes import answering, ending_in_words

STOP_SECONDS = 10.0
"""How long a fork server may take to end all its forks once its socket is closed. It runs no user code: it is quick."""
KILL_SECONDS = 60.0
"""How long a fork server may take to make a fork, or a reaper to end one. Those that take longer are stuck: the one is
killed, the other is left alone, so that no call waits for ever."""
STARTS_AT_ONCE = 16
"""Processes that the fork server is asked for at a time. It forks one after the other, and with a large data set in a
second or two: so the last of them is made well within `KILL_SECONDS`, and their sockets fit on the way."""
REAP_SECONDS = 10.0
"""How long the kernel may take to end a killed process."""
DRAIN_SECONDS = 2.0
"""How long to wait for the rest of an end: of output, or for the process to be gone that has closed its socket."""

logger = logging.getLogger(__name__)


class ForkedProcess(asyncio.Protocol):
    """A process that answers calls of user code; as a protocol, the worker's end of its socket."""

    def __init__(self, reaper: socket.socket) -> None:
        self._reaper = reaper
        self._said = b""  # by it
        self._frames: Frames[CallResult] = Frames(read_result, LARGEST_RESULT)
        self._bad_frame = ""
        self._ending = ""
        self._disconnected = False
        self.lost_server = ""
        """How its fork server died, if it ended for that reason."""
        self.transport: asyncio.WriteTransport
        self.on_results: Callable[[list[CallResult]], None] = lambda results: None
        self.started = asyncio.Event()
        """Set when the fork server has forked it, or could not."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How the process ended, in words."""
        reaper.setblocking(False)
        asyncio.get_running_loop().add_reader(reaper, self._hear)

    @property
    def alive(self) -> bool:
        """Whether nothing is known of its end, and it wrote nothing that it is killed for."""
        return not (self._ending or self._disconnected or self._bad_frame)

    def send(self, calls: bytes) -> None:
        self.transport.write(calls)

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        with contextlib.suppress(OSError):
            self._reaper.shutdown(socket.SHUT_WR)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self._reaper_ended)  # user code may have stopped it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        results: list[CallResult] = []
        try:
            results.extend(self._frames.feed(data))
        except BadFrame as error:  # the results in front of it are of calls that did end: the next one is to blame
            self._bad_frame = f"wrote what is no answer ({escaped(str(error))}) and "
            self.transport.abort()
        if results:
            self.on_results(results)

    def connection_lost(self, error: Exception | None) -> None:
        self._disconnected = True
        if not self._ending:
            self.kill()  # it may have closed its socket and gone on: it could answer nothing any more
        self._check_ended()

    def _hear(self) -> None:
        try:
            data = self._reaper.recv(1 << 12)
        except OSError:
            data = b""
        self._said += data
        if self._said.startswith(FORKED):
            self.started.set()
        if not data:
            self._reaper_ended()

    def _reaper_ended(self) -> None:
        if self._ending:
            return
        asyncio.get_running_loop().remove_reader(self._reaper)
        self._reaper.close()
        if not self._said and not self.lost_server:
            self.lost_server = "ended: the process that it was to be forked from has died"
        how = self._said.removeprefix(FORKED).decode() or ending_in_words(-signal.SIGKILL)
        self._ending = self._bad_frame + (self.lost_server or how)
        self.started.set()
        # if the reaper was killed, processes of user code may hold the socket open: do not wait for its end of stream
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self.transport.abort)
        self._check_ended()

    def _check_ended(self) -> None:
        if self._disconnected and self._ending and not self.ended.done():
            self.ended.set_result(self._ending)


class ForkServerClient:
    """One process of an environment's host. A restart makes a new object."""

    def __init__(self, setup: EnvironmentSetup):
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._forks: set[ForkedProcess] = set()
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._socket: socket.socket

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def gone(self) -> bool:
        return self._process is None or self._exited.done() or self._socket.fileno() < 0

    async def start(self) -> TaskInfo:
        """Spawn the fork server and wait until it has made its environment. If that fails, the fork server is stopped.
        Raises ConfigError: the environment refused its arguments; TaskError: it could not be made in time."""
        name, seconds = self._setup.name, self._setup.start_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._spawn()
                result = await self._set_up()
        except TimeoutError:
            await self.stop(patient=False)
            raise TaskError(f"environment {name!r} was not ready within {seconds:g} s") from None
        except (OSError, BadFrame):
            await self.stop()
            raise TaskError(f"the process of environment {name!r} {self._ending()} while starting") from None
        except BaseException:
            await self.stop(patient=False)
            raise
        if result.info is not None:
            return result.info
        await self.stop()
        refusal = escaped(result.refusal, keep="\n")
        if result.kind == "task":
            raise TaskError(f"environment {name!r} could not be made: {refusal}")
        raise (AbsentError if result.kind == "absent" else ConfigError)(refusal)

    async def fork(self) -> ForkedProcess:
        """A new process for user code. Waits for its turn. Raises ActorGone: the fork server has died;
        InfrastructureFailed: it could not be forked, or ended at once."""
        async with self._starts:
            try:
                (ours, theirs), (reaper, reapers) = socket.socketpair(), socket.socketpair()
            except OSError as error:
                raise InfrastructureFailed(f"no process can be made for it: {error}") from error
            fork = ForkedProcess(reaper)
            with theirs, reapers:
                await self._loop.create_unix_connection(lambda: fork, sock=ours)
                if self.gone:
                    raise ActorGone(f"the process that it is forked from {self._ending()}")
                try:
                    socket.send_fds(self._socket, [b"\0"], [theirs.fileno(), reapers.fileno()])
                except ConnectionError:
                    pass  # the fork server has ended, and so has the fork, in which nothing has run
                except OSError as error:  # it does not read, and hundreds wait
                    raise InfrastructureFailed(f"no process can be made for it: {error}") from error
            self._forks.add(fork)
            fork.ended.add_done_callback(lambda _: self._forks.discard(fork))
            self._loop.call_later(KILL_SECONDS, self._kill_unless_started, fork)
            try:
                await fork.started.wait()
            except asyncio.CancelledError:
                fork.kill()
                raise
        if not fork.alive:
            raise (ActorGone if fork.lost_server else InfrastructureFailed)(f"its process {await fork.ended}")
        return fork

    async def stop(self, *, patient: bool = True) -> None:
        """End the fork server by closing its socket. It is killed if it does not end in time. May be called again."""
        if self._process is None:
            return
        self._close()
        if not patient:
            self._kill()
        await asyncio.wait([self._exited], timeout=STOP_SECONDS + REAP_SECONDS)
        if not self._exited.done():
            logger.error("the process %d of an environment was killed and does not end", self._process.pid)
        if self._forks:
            await asyncio.wait([fork.ended for fork in self._forks], timeout=STOP_SECONDS)
        await asyncio.wait([self._lines.ended], timeout=DRAIN_SECONDS)
        self._output.close()

    async def _spawn(self) -> None:
        output, child_output = os.pipe()
        # all awaits come before the process exists, so that a cancellation leaves no process
        self._output, self._lines = await self._loop.connect_read_pipe(LogLines, os.fdopen(output, "rb"))
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            # not in a helper thread: the fork server dies with the thread that spawns it
            self._process = subprocess.Popen(
                [sys.executable, "-m", "titan_rl.isolation.fork_server", *map(str, (theirs.fileno(), os.getpid()))],
                env=user_variables(self._setup.name, self._setup.variables),
                stdin=subprocess.DEVNULL,
                stdout=child_output,
                stderr=child_output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C does not reach it, and a kill of the group also kills its children
            )
        except OSError:
            self._socket.close()
            self._output.close()
            raise
        finally:
            theirs.close()
            os.close(child_output)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def _set_up(self) -> SetupResult:
        """Have it make the environment. Raises ConnectionError or BadFrame where it answers nothing or something
        else."""
        await self._loop.sock_sendall(self._socket, pickle.dumps((sys.path, self._setup)))
        frames: Frames[SetupResult] = Frames(read_setup_result, LARGEST_RESULT)
        while not (results := [*frames.feed(data := await self._loop.sock_recv(self._socket, 1 << 16))]):
            if not data:
                raise ConnectionError("closed")
        answering.add(self._pidfd)
        self._loop.add_reader(self._socket, self._hung_up)  # from now on it says nothing
        return results[0]

    def _hung_up(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.call_later(DRAIN_SECONDS, self._close)  # sooner where it has ended, which says how

    def _close(self) -> None:
        """From now on the fork server ends after all its forks, if it does not do so already."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._loop.call_later(STOP_SECONDS, self._kill)  # user code may keep it from its end
        for fork in self._forks:
            fork.lost_server = f"ended: the process that it was forked from {self._ending()}"
            fork.kill()

    def _kill_unless_started(self, fork: ForkedProcess) -> None:
        if not self._exited.done() and not fork.started.is_set():
            logger.error("the fork server %s of an environment makes no process and is killed", self.pid)
            self._kill()

    def _kill(self) -> None:
        """Kill the fork server and its process group, if it has not ended."""
        if self._process is not None and not self._exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ending(self) -> str:
        status = self._process.returncode if self._process else None
        return "closed its connection" if status is None else ending_in_words(status)

    def _reap(self) -> None:
        """Called once, when the fork server has ended."""
        assert self._process is not None
        self._loop.remove_reader(self._pidfd)
        answering.discard(self._pidfd)
        os.close(self._pidfd)
        # its id cannot be reused before it is reaped; this also kills what user code started in the fork server
        self._kill()
        self._process.wait()
        self._exited.set_result(None)
        self._close()
