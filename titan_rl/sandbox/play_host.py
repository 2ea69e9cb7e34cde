"""The process that programs are forked from: `python -m titan_rl.sandbox.play_host SOCKET_FD WORKER_PID`.

- It makes the environment once, then runs no user code itself: it has no threads and no event loop of its own, so that
  a fork of it is sound and what was imported is shared by all plays.
- Each play gets a process and a keeper (`play_keeper`), and ends with one `Ended`, whatever it does.
- When the worker closes its socket or dies, every play ends, with all that it started.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from titan_rl.environments.base import Environment
from titan_rl.errors import TaskError
from titan_rl.processes import ending_in_words
from titan_rl.sandbox.child_side import Failure, Tracebacks, Worker
from titan_rl.sandbox.environment_wire import EnvironmentSetup
from titan_rl.sandbox.play_keeper import (
    KEEPER_SIGNALS,
    Outcome,
    flush_output,
    keep,
    look_into_box,
    make_box,
    put_in_box,
)
from titan_rl.sandbox.play_wire import Ended, Kill, Start
from titan_rl.sandbox.task import Examples, make_environment

_STATE, _FAILURE, _SEPARATOR = b"S", b"F", "\0"


class Program:
    """What is played: an environment's `play`."""

    def __init__(self, setup: EnvironmentSetup):
        self._environment: Environment = make_environment(setup)
        self._examples = Examples(self._environment, setup)

    def play(self, start: Start) -> bytes:
        """What goes into the box: the pickled state, or the failure. Everything that user code may do happens here."""
        try:
            example = self._examples.find(start.purpose, start.prompt_index)
            state = self._environment.play(example, start.endpoint)
            if inspect.isawaitable(state):
                state = asyncio.run(_awaited(state))
            return _STATE + (b"" if state is None else _pickled(state))
        except BaseException as error:  # user code may raise anything, SystemExit and KeyboardInterrupt included
            return _FAILURE + _SEPARATOR.join(Failure.of(error)).encode(errors="replace")


class PlayHost:
    """Forks plays and tells what became of them."""

    def __init__(self, worker: Worker, program: Program):
        self._worker = worker
        self._program = program
        self._plays: dict[int, _Play] = {}
        self._tracebacks = Tracebacks()
        self._selector = selectors.DefaultSelector()
        self._wake, self._wake_end = socket.socketpair()

    def serve(self) -> None:
        """Consumes frames and ends of children; waits for either; produces `Ended`s; returns when the worker closes."""
        self._wake.setblocking(False)
        self._wake_end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler no byte is written
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._worker.connection, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()  # what is here now will never be garbage: no collection in a play touches, and so copies, its pages
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wake in ready:
                self._wake.recv(4096)
                self._reap()
            if self._worker.connection in ready:
                commands = self._worker.receive_some()
                if commands is None:
                    break
                for command in commands:
                    self._obey(command)
        self._end_all()

    def _obey(self, command: Start | Kill) -> None:
        if isinstance(command, Start):
            try:
                self._start(command)
            except OSError as error:
                self._worker.send(Ended(command.number, f"no process can be made for it: {error}", None))
        elif command.number in self._plays:
            os.kill(self._plays[command.number].keeper_pid, signal.SIGTERM)  # not reaped yet: the id is its own

    def _start(self, start: Start) -> None:
        box, host_pid = make_box(), os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, KEEPER_SIGNALS)
        try:
            flush_output()  # or what is waiting to be written is written by every fork
            keeper_pid = os.fork()
            if keeper_pid == 0:
                keep(host_pid, box, self._let_go, lambda: self._play(start, box))
        except OSError:
            os.close(box)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._plays[start.number] = _Play(start, keeper_pid, box)

    def _let_go(self) -> None:
        """In a forked process: of everything that is the host's."""
        self._selector.close()
        self._wake.close()
        self._wake_end.close()
        self._worker.connection.close()
        for play in self._plays.values():
            os.close(play.box)

    def _play(self, start: Start, box: int) -> None:
        put_in_box(box, self._program.play(start))
        flush_output()

    def _reap(self) -> None:
        for number, play in list(self._plays.items()):
            pid, _ = os.waitpid(play.keeper_pid, os.WNOHANG)
            if pid:
                del self._plays[number]
                outcome = look_into_box(play.box)
                os.close(play.box)
                self._worker.send(self._ended(play.start, outcome))

    def _ended(self, start: Start, outcome: Outcome | None) -> Ended:
        if outcome is None:
            return Ended(start.number, "the process that keeps it was killed", None)
        kind, content = outcome.written[:1], outcome.written[1:]
        if outcome.status != 0 or not kind:
            return Ended(start.number, f"its process {ending_in_words(outcome.status)} and returned nothing", None)
        if kind == _STATE:
            return Ended(start.number, "", content or None)
        failure = Failure(*content.decode().split(_SEPARATOR, 2))
        self._tracebacks.show(f"play of {start.purpose} prompt {start.prompt_index} failed", failure)
        return Ended(start.number, failure.description, None)

    def _end_all(self) -> None:
        for play in self._plays.values():
            os.kill(play.keeper_pid, signal.SIGTERM)
        for play in self._plays.values():
            os.waitpid(play.keeper_pid, 0)


@dataclass(frozen=True, slots=True)
class _Play:
    """A running play."""

    start: Start
    keeper_pid: int
    box: int


def _pickled(state: object) -> bytes:
    try:
        return pickle.dumps(state)
    except Exception as error:  # pickling runs the state's own code
        raise TaskError(f"play returned a {type(state).__name__} that does not pickle: {error}") from error


async def _awaited(value):
    return await value


def main(arguments: Sequence[str]) -> None:
    with Worker(*map(int, arguments)) as worker:
        program = worker.make(Program)
        if program is not None:
            worker.send(None)
            PlayHost(worker, program).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
