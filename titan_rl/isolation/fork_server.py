"""The fork server: the process that makes an environment and forks the processes that run its code.
Started as `python -m titan_rl.isolation.fork_server SOCKET_FD WORKER_PID`.

    worker ── fork server ── reaper ── process that runs user code ── processes that it starts

- The fork server imports user code and makes the environment once, and runs no user code after that. It has no threads
  and no event loop of its own, so it can be forked safely, and the forks share imports and loaded data.
- For each fork the worker sends two sockets: one for its calls, one for its reaper, which runs no user code. A reaper
  is a "subreaper": every process that user code starts, in any session, becomes its child when its parent ends, so it
  finds all of them. It kills only its own unreaped children, so it cannot hit a reused id.
- A reaper says `FORKED`, and how its process ended when all processes are gone. It ends them when the worker shuts down
  its end of the socket, or dies.
- When the worker closes its socket or dies, the fork server ends after all its reapers.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Literal

from titan_rl.environments.programs import prepare_clients
from titan_rl.errors import AbsentError, ConfigError
from titan_rl.importing import describe
from titan_rl.isolation.user_code import UserCode
from titan_rl.isolation.wire import FORKED, SetupResult, pack_report
from titan_rl.one_line import sendable
from titan_rl.processes import die_with, ending_in_words, forked, process_control

_PR_SET_CHILD_SUBREAPER = 36


def _answer_calls(reaper_pid: int, user_code: UserCode, control: socket.socket, connection: socket.socket) -> None:
    control.close()
    os.setsid()
    die_with(reaper_pid)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    user_code.serve(connection)


def _wait_for(child_pid: int, control: socket.socket) -> int:
    """Wait until the process has ended, by itself or at the worker's request, and all processes that it started are
    gone. Returns its exit code, or the signal that killed it as a negative number."""
    either = select.poll()
    for ended in (os.pidfd_open(child_pid), control.fileno()):
        either.register(ended, select.POLLIN)
    either.poll()
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
            return os.waitstatus_to_exitcode(status)


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


def serve(worker: socket.socket, user_code: UserCode) -> None:
    """Fork whenever the worker sends the two sockets of a fork; returns when it closes."""
    reapers: set[int] = set()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whatever user code has set: reapers wait for their children, too
    gc.collect()
    gc.freeze()  # so that no collection in a fork touches, and thereby copies, the pages of existing objects
    while True:
        message, descriptors, *_ = socket.recv_fds(worker, 1, 2)
        reapers -= {pid for pid in reapers if os.waitpid(pid, os.WNOHANG)[0]}
        if not message:
            break
        connection, control = (socket.socket(fileno=each) for each in descriptors)
        with connection, control:
            for each in (connection, control):
                os.set_inheritable(each.fileno(), False)
            try:
                reapers.add(forked(partial(_be_reaper, worker, control, connection, user_code)))
            except OSError as error:
                with contextlib.suppress(OSError):  # the worker is gone
                    control.sendall(f"could not be forked ({error})".encode())
    for pid in reapers:
        os.waitpid(pid, 0)


def _be_reaper(worker: socket.socket, control: socket.socket, connection: socket.socket, user_code: UserCode) -> None:
    """Be the reaper of a process that answers calls, in a process just forked."""
    worker.close()
    os.setsid()
    process_control(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a job's scheduler sends it to all processes
    with contextlib.suppress(BrokenPipeError):  # the worker died
        try:
            child_pid = forked(partial(_answer_calls, os.getpid(), user_code, control, connection))
        except OSError as error:
            ending = f"could not be forked ({error})"
        else:
            connection.close()
            control.sendall(FORKED)
            ending = ending_in_words(_wait_for(child_pid, control))
        control.sendall(ending.encode())


def main(arguments: Sequence[str]) -> None:
    descriptor, worker_pid = map(int, arguments)
    die_with(worker_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's business
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the worker passes it on (`metrics.waits`)
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as worker:
        try:
            sys.path[:], setup = pickle.load(worker.makefile("rb"))
        except EOFError:
            return
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
        serve(worker, user_code)


if __name__ == "__main__":
    main(sys.argv[1:])
