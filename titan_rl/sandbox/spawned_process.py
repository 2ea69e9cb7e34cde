"""A child process of a rollout worker, from spawn to reaping, whatever it runs.

- It is a session of its own, speaks frames over one socket, and dies with the thread that spawned it. The first frame
  down tells it which environment to make; the first one up is what it says about it, or (text, ConfigError) why it
  could not.
- After `stop` the process is gone, reaped, its process group too, and all descriptors are closed.
- What it prints goes to this module's logger line by line; nothing that user code prints can reach the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_rl.errors import ConfigError, TaskError
from titan_rl.processes import ending_in_words
from titan_rl.sandbox.environment_wire import FRAME_LENGTH, EnvironmentSetup, pack_frame

STOP_SECONDS = 2.0
"""What a child may take to end by itself once its socket is closed; then it is killed."""
REAP_SECONDS = 10.0
"""What the kernel may take to end a killed process."""
MAX_LOG_LINE = 4096
"""Longer lines of output are logged in pieces."""

logger = logging.getLogger(__name__)


class SpawnedProcess:
    """`python -m MODULE SOCKET_FD [FURTHER_FD …] WORKER_PID`, which makes an environment.

    Args:
        module: what runs.
        stop_seconds: what it may take to end by itself once its socket is closed.
    """

    def __init__(self, module: str, *, stop_seconds: float = STOP_SECONDS):
        self._module = module
        self._stop_seconds = stop_seconds
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._output_ended = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None before it was spawned."""
        return self._process.pid if self._process else None

    @property
    def exited(self) -> bool:
        return self._exited.is_set()

    async def make_environment(self, setup: EnvironmentSetup, pass_fds: Sequence[int] = ()) -> Any:
        """Spawn it and wait until it has made its environment. Where that fails it is stopped.

        Returns:
            What the child says about it.

        Raises:
            ConfigError: the environment refused its arguments.
            TaskError: the environment could not be imported or made, or not within `setup.start_seconds`.
        """
        try:
            async with asyncio.timeout(setup.start_seconds):
                await self._spawn(pass_fds)
                self.send((sys.path, setup))
                hello = await self.receive()
        except TimeoutError:
            await self.stop(patient=False)
            raise TaskError(f"environment {setup.name!r} was not ready within {setup.start_seconds:g} s") from None
        except (EOFError, OSError):
            await self.stop()
            raise TaskError(f"the process of environment {setup.name!r} {self.ending()} while starting") from None
        except BaseException:
            await self.stop(patient=False)
            raise
        if isinstance(hello, ConfigError):
            await self.stop()
            raise hello
        if isinstance(hello, str):
            await self.stop()
            raise TaskError(f"environment {setup.name!r} could not be made: {hello}")
        return hello

    async def _spawn(self, pass_fds: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        output, child_output = os.pipe()
        # everything that can be interrupted comes before the process exists
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        self._output, _ = await self._loop.connect_read_pipe(
            lambda: _LogLines(self._output_ended), os.fdopen(output, "rb")
        )
        package_root = str(Path(__file__).resolve().parents[2])
        # sets of text are walked in hash order: a process that is started anew has to draw the same examples again
        environment = {"PYTHONHASHSEED": "0", **os.environ, "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        arguments = map(str, (theirs.fileno(), *pass_fds, os.getpid()))
        try:
            # spawned here and not in a helper thread: the child dies with the very thread that starts it
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=child_output,
                stderr=child_output,
                pass_fds=(theirs.fileno(), *pass_fds),
                start_new_session=True,  # Ctrl-C stays with the worker; a kill takes what user code started along
            )
        except OSError:
            self._writer.close()
            self._output.close()
            raise
        finally:
            theirs.close()
            os.close(child_output)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def send(self, message: Any) -> None:
        """One frame, on its way some time soon."""
        self._writer.write(pack_frame(message))

    async def drain(self) -> None:
        """Until the child has taken most of what was sent."""
        await self._writer.drain()

    async def receive(self) -> Any:
        """The next frame.

        Raises:
            EOFError, OSError: there will be none.
        """
        (length,) = FRAME_LENGTH.unpack(await self._reader.readexactly(FRAME_LENGTH.size))
        return pickle.loads(await self._reader.readexactly(length))

    async def stop(self, *, patient: bool = True) -> None:
        """End the process, by closing its socket or, if that does not do it in time or `patient` is False, by a kill.
        May be called again."""
        if self._process is None:
            return
        self._writer.close()
        if not patient:
            self.kill()
        if not await _happens(self._exited, self._stop_seconds):
            self.kill()
            if not await _happens(self._exited, REAP_SECONDS):
                logger.error("%s, process %d, was killed and does not end", self._module, self._process.pid)
        # its last words, unless something else holds the pipe open
        await _happens(self._output_ended, self._stop_seconds)
        self._output.close()

    def kill(self) -> None:
        """The process and its group, if it has not ended."""
        if self._process is not None and not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def ending(self) -> str:
        """How it ended, in words."""
        status = self._process.returncode if self._process else None
        return "closed its connection" if status is None else ending_in_words(status)

    def _reap(self) -> None:
        """Called once, when the process has ended."""
        assert self._process is not None
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # before it is reaped its id cannot be anybody else's; takes along what user code started and left behind
        self.kill()
        self._process.wait()
        self._exited.set()
        # a process that user code forked away may hold the other end open, and no end of stream would come
        self._loop.call_later(STOP_SECONDS, self._writer.transport.abort)


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


class _LogLines(asyncio.Protocol):
    """Logs what a child prints."""

    def __init__(self, ended: asyncio.Event):
        self._ended = ended
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LOG_LINE:
            lines.append(self._rest[:MAX_LOG_LINE])
            self._rest = self._rest[MAX_LOG_LINE:]
        for line in lines:
            logger.info("%s", line.decode(errors="replace"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            logger.info("%s", self._rest.decode(errors="replace"))
        self._ended.set()
