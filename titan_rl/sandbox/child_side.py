"""What the child processes of a rollout worker have in common: their worker, and how they tell of user code's failures.

- A child dies with the thread of the worker that started it, and ends orderly at the end of its socket.
- Ctrl-C is the worker's business.
- A failure is told in one line; its traceback is shown once per place, because the same grader fails hundreds of times
  a step.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from titan_rl.errors import AbsentError, ConfigError
from titan_rl.importing import describe
from titan_rl.processes import die_with
from titan_rl.sandbox.environment_wire import FRAME_LENGTH, EnvironmentSetup, pack_frame

Made = TypeVar("Made")


class Failure(NamedTuple):
    """An exception of user code as text."""

    place: str
    """The same for exceptions of one type from one line."""
    description: str
    """One line."""
    traceback: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        return Failure(type(error).__name__ + where, describe(error), "".join(traceback.format_exception(error)))


class Tracebacks:
    """Shown on standard error, one per place."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, what: str, failure: Failure) -> None:
        if failure.place not in self._shown:
            self._shown.add(failure.place)
            print(f"{what}:\n{failure.traceback}", end="", file=sys.stderr, flush=True)


class Worker:
    """The worker, as its child sees it: frames in both directions."""

    def __init__(self, socket_fd: int, worker_pid: int):
        die_with(worker_pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.set_inheritable(socket_fd, False)
        self.connection = socket.socket(fileno=socket_fd)
        self._received = bytearray()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def make(self, build: Callable[[EnvironmentSetup], Made]) -> Made | None:
        """What `build` makes of the setup that the worker sends first. None where it raised: the worker was told, and
        cannot do without it."""
        sys.path[:], setup = self.receive()
        try:
            return build(setup)
        except BaseException as error:
            traceback.print_exception(error, file=sys.stderr)
            refusal = AbsentError if isinstance(error, AbsentError) else ConfigError
            self.send(refusal(str(error)) if isinstance(error, ConfigError) else describe(error))
            return None

    def receive(self) -> Any:
        """The next frame; None at the end of the stream."""
        while (frame := self._frame()) is None:
            if not self._read():
                return None
        return pickle.loads(frame)

    def receive_some(self) -> list[Any] | None:
        """Those frames that are whole after one look at the socket, maybe none; None at the end of the stream."""
        if not self._read():
            return None
        frames = []
        while (frame := self._frame()) is not None:
            frames.append(pickle.loads(frame))
        return frames

    def _read(self) -> bool:
        received = self.connection.recv(1 << 20)
        self._received += received
        return bool(received)

    def _frame(self) -> bytes | None:
        """The next frame that has come as a whole."""
        head = FRAME_LENGTH.size
        if len(self._received) < head:
            return None
        (length,) = FRAME_LENGTH.unpack_from(self._received)
        if len(self._received) < head + length:
            return None
        frame = bytes(self._received[head : head + length])
        del self._received[: head + length]
        return frame

    def send(self, message: Any) -> None:
        self.connection.sendall(pack_frame(message))
