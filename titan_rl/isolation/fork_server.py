"""The fork server: the process that makes an environment and forks the processes that run its code.
Started as `python -m titan_rl.isolation.fork_server SOCKET_FD SOCKETS_FD WORKER_PID`; by the second come sockets.

    worker ── fork server ── reaper ── process that runs user code ── processes that it starts

- The fork server imports user code and makes the environment once, and runs no user code after that. It has no threads
  and no event loop of its own, so it can be forked safely, and the forks share imports and loaded data.
- Each fork has a reaper, which runs no user code. It is a "subreaper": every process that user code starts, in any
  session, becomes its child when its parent ends, so it finds all of them. It kills only its own unreaped children, so
  it cannot hit a reused id.
- A reaper ends its process when the fork server says so (SIGTERM) or dies (the kernel then sends SIGTERM). It exits
  when all processes are gone, with an exit code as shells give it: that of the process, or 128 + the signal that killed
  it.
- Each fork ends with one last `ForkStatus`, whatever it does. When the worker closes its socket or dies, every fork
  ends, with all processes that it started.
"""

import contextlib
import faulthandler
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from titan_rl.environments.programs import prepare_clients
from titan_rl.errors import AbsentError, ConfigError
from titan_rl.importing import describe
from titan_rl.isolation.user_code import UserCode
from titan_rl.isolation.wire import Fork, ForkStatus, Frames, Kill, SetupResult, pack_report
from titan_rl.one_line import sendable
from titan_rl.processes import die_with, ending_in_words, process_control

REAPER_SIGNALS = frozenset({signal.SIGTERM, signal.SIGCHLD})
"""Signals that a reaper waits for. They must be blocked before it is forked."""

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALLED = 128


def _answer_calls(reaper_pid: int, user_code: UserCode, connection: socket.socket) -> NoReturn:
    try:
        os.setsid()
        die_with(reaper_pid)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REAPER_SIGNALS)
        user_code.serve(connection)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _wait_for(child_pid: int) -> int:
    """Wait until the process has ended, by itself or at the fork server's request, and all processes that it started
    are gone. Returns its wait status."""
    while os.waitid(os.P_PID, child_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if signal.sigwait(REAPER_SIGNALS) == signal.SIGTERM:
            break
    with contextlib.suppress(ProcessLookupError):  # it may not have made its process group yet
        os.killpg(child_pid, signal.SIGKILL)
    os.kill(child_pid, signal.SIGKILL)
    _, status = os.waitpid(child_pid, 0)  # first, because most leave nothing, and looking for children takes 3 ms
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for child in _children():
                    os.kill(child, signal.SIGKILL)
                os.waitpid(-1, 0)
        except ChildProcessError:
            return status


def _children() -> list[int]:
    """This process's children, with zombies. Found by reading all of /proc, because not every kernel lists children."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                if parent == os.getpid():
                    children.append(int(entry))
    return children


class ForkServer:
    def __init__(self, worker: socket.socket, sockets: socket.socket, user_code: UserCode):
        self._worker = worker
        self._sockets = sockets
        self._user_code = user_code
        self._reapers: dict[int, int] = {}  # process ids by number
        self._selector = selectors.DefaultSelector()
        self._wake, self._wake_end = socket.socketpair()

    def serve(self) -> None:
        """Consumes frames and ends of reapers; waits for either; produces `ForkStatus`es; returns when the worker
        closes."""
        self._wake.setblocking(False)
        self._wake_end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the wake-up socket
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._worker, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()  # so that no collection in a fork touches, and thereby copies, the pages of existing objects
        frames = Frames.of_orders()
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wake in ready:
                self._wake.recv(4096)
                self._reap()
            if self._worker in ready:
                if not (data := self._worker.recv(1 << 16)):
                    break
                for command in frames.feed(data):
                    self._obey(command)
        for reaper in self._reapers.values():
            os.kill(reaper, signal.SIGTERM)
        for reaper in self._reapers.values():
            os.waitpid(reaper, 0)

    def _obey(self, command: Fork | Kill) -> None:
        if isinstance(command, Fork):
            _, (descriptor,), *_ = socket.recv_fds(self._sockets, 1, 1)
            os.set_inheritable(descriptor, False)
            with socket.socket(fileno=descriptor) as connection:
                try:
                    self._reapers[command.number] = self._fork(connection)
                except OSError as error:
                    self._report(ForkStatus(command.number, f"could not be forked ({error})"))
                else:
                    self._report(ForkStatus(command.number))
        elif command.number in self._reapers:
            os.kill(self._reapers[command.number], signal.SIGTERM)  # not reaped yet, so the id cannot be reused

    def _fork(self, connection: socket.socket) -> int:
        server_pid = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, REAPER_SIGNALS)
        try:
            reaper_pid = os.fork()
            if reaper_pid == 0:
                self._be_reaper(server_pid, connection)
            return reaper_pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _be_reaper(self, server_pid: int, connection: socket.socket) -> NoReturn:
        """Be the reaper of a process that answers calls, in a process just forked with `REAPER_SIGNALS` blocked."""
        try:
            self._selector.close()
            for server_socket in (self._wake, self._wake_end, self._worker, self._sockets):
                server_socket.close()
            os.setsid()
            signal.set_wakeup_fd(-1)
            process_control(_PR_SET_CHILD_SUBREAPER, 1)
            die_with(server_pid, signal.SIGTERM)
            reaper_pid = os.getpid()
            child_pid = os.fork()
            if child_pid == 0:
                _answer_calls(reaper_pid, self._user_code, connection)
            connection.close()
            code = os.waitstatus_to_exitcode(_wait_for(child_pid))
            os._exit(code if code >= 0 else _SIGNALLED - code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _reap(self) -> None:
        for number, reaper in list(self._reapers.items()):
            pid, status = os.waitpid(reaper, os.WNOHANG)
            if pid:
                del self._reapers[number]
                code = os.waitstatus_to_exitcode(status)
                signalled = _SIGNALLED < code <= _SIGNALLED + signal.SIGRTMAX
                self._report(ForkStatus(number, ending_in_words(_SIGNALLED - code if signalled else code)))

    def _report(self, status: ForkStatus) -> None:
        self._worker.sendall(pack_report(status))


def main(arguments: Sequence[str]) -> None:
    *descriptors, worker_pid = map(int, arguments)
    die_with(worker_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's business
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the worker passes it on (`metrics.waits`)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    worker, sockets = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    with worker, sockets:
        frames = Frames.of_orders()
        received: list[Any] = []
        while not received:
            if not (data := worker.recv(1 << 20)):
                return
            received = frames.feed(data)
        sys.path[:], setup = received[0]
        try:
            user_code = UserCode(setup)
        except BaseException as error:
            traceback.print_exception(error, file=sys.stderr)
            absent, config = isinstance(error, AbsentError), isinstance(error, ConfigError)
            kind: Literal["task", "config", "absent"] = "absent" if absent else "config" if config else "task"
            worker.sendall(pack_report(SetupResult(None, sendable(describe(error)), kind)))
            return
        if threads := threading.active_count() - 1:
            print(
                f"environment {setup.name} has started {threads} threads while it was made: the processes that run its "
                "methods are forked and do not have them; start threads when they are first needed",
                file=sys.stderr,
            )
        if user_code.info.plays:
            try:
                prepare_clients()
            except Exception:  # of a client of another version: it costs each rollout time, and no more
                traceback.print_exc()
        worker.sendall(pack_report(SetupResult(user_code.info)))
        ForkServer(worker, sockets, user_code).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
