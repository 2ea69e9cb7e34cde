"""The fork server of a host: imports once what the processes of its meshes need, and forks them.

    python -m titan_rl.supervision.fork_server DIRECTORY STAGE

    fork server ─┬─ light ── router, gateway, rollout0 …
                 └─ torch ─┬─ torchtitan ── ranks of the trainer
                           └─ vLLM ── ranks of generators

- A stage is a process that has imported more than the one that it was forked from. It begins when a process of its
  kinds is asked for, or at once where that is sure to come (`now`).
- A process is asked for by a `proxy`, through the socket KIND.fork in DIRECTORY. It has the proxy's variables,
  standard streams, working directory, cores and scheduling class, and a process group of its own.
- A stage has one thread, no device open and no Monarch: threads, a device's context and Monarch's runtime do not
  survive a fork. Where imports have made threads or opened a device, the stage logs which, and its processes start
  Python anew. So does one whose variables differ in what Python and native libraries read when they are loaded.
- Pages are shared for as long as nobody writes to them, so garbage collection leaves out what was imported.
- The stages end with the watch (`process_watch`), and with the stage that they were forked from. Processes do not: a
  stage that is killed ends nothing, and is there again when the next process is asked for.
- A process that has ended is reaped some seconds later, so that the watch and the proxy can read its exit status.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from titan_rl.processes import die_with, die_with_owner, die_with_peer, forked, run_and_exit

MONARCH_MAIN = "monarch._src.actor.bootstrap_main"
"""What `monarch.actor.default_bootstrap_cmd()` runs; a test compares."""

LINGER_SECONDS = 10.0
"""How long a process that has ended is not reaped: longer than a busy host keeps its watch waiting."""
LOOK_SECONDS = 1.0
"""Between two looks for processes and stages that have ended."""
READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_")
"""Beginnings of variables that Python and native libraries read when they are loaded."""

REQUEST_SECONDS = 10.0
"""How long a proxy may take to say what it wants, which it does at once."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A process that forks others."""

    name: str
    kinds: tuple[str, ...] = ()
    """Of the meshes whose processes it forks."""
    environment: Mapping[str, str] | None = None
    """Variables that its imports read. They must be those of its processes."""
    imports: tuple[str, ...] = ()
    """Modules, or `pkg.mod:function`, a function that imports for `device`."""
    device: str = "cpu"
    above: tuple[Stage, ...] = ()
    """The stages that are forked from it."""
    now: bool = False
    """It begins before it is asked."""

    @property
    def all_kinds(self) -> tuple[str, ...]:
        """Of it and of the stages above it."""
        return self.kinds + tuple(kind for stage in self.above for kind in stage.all_kinds)


def why_not_fork() -> str:
    """What of this process would not survive a fork; empty: nothing."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)  # numpy's OpenBLAS ends its threads at a fork, and starts them again when it has work
    if len(tasks := os.listdir("/proc/self/task")) > 1:
        names = sorted({Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks})
        return f"there are {len(tasks)} threads ({', '.join(names)})"
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if (file := os.readlink(f"/proc/self/fd/{descriptor}")).startswith("/dev/nvidia"):
                return f"{file} is open"
    return ""


class ForkServer:
    """One stage, in its process. Takes over the sockets of its kinds and of those above it, which listen."""

    def __init__(self, directory: str, stage: Stage, sockets: dict[str, socket.socket]) -> None:
        self._directory = directory
        self._stage = stage
        self._sockets = sockets
        self._stages: dict[int, Stage] = {}  # that were forked, by process id
        self._processes: dict[int, float] = {}  # that were forked: when it was seen that they had ended, or 0
        self._anew = False
        self._environment: dict[str, str] = {}  # in which it imports
        self._set: dict[str, str] = {}  # variables that imports have set

    def serve(self) -> NoReturn:
        """Import, then fork what is asked for."""
        set_title(f"titan_rl fork server ({self._stage.name})")
        os.environ.update(self._stage.environment or {})
        self._environment = dict(os.environ)
        gc.disable()  # it would look at what is imported again and again, and find nothing
        for each in self._stage.imports:
            module, _, function = each.partition(":")
            try:
                imported = importlib.import_module(module)
                if function:
                    getattr(imported, function)(self._stage.device)
            except Exception:  # the process that needs it says so, to those who wait for it
                _log.exception("%s cannot be imported", each)
        self._set = {name: value for name, value in os.environ.items() if self._environment.get(name) != value}
        if reason := why_not_fork():
            self._anew = True
            _log.warning("%s: processes start Python anew, because %s", self._stage.name, reason)
        gc.freeze()
        gc.enable()
        sys.stdout.flush()  # or each process prints it again
        for stage in self._stage.above:
            if stage.now:
                self._begin(stage)
        while True:
            kinds = {listener: kind for kind, listener in self._sockets.items()}
            ready, _, _ = select.select([*kinds], [], [], LOOK_SECONDS if self._processes or self._stages else None)
            self._look_after_children()
            for kind in (kinds[listener] for listener in ready):
                if kind in self._stage.kinds:
                    self._answer(self._sockets[kind])
                elif kind in self._sockets:  # the stage of another one may have taken it over just now
                    self._begin(next(stage for stage in self._stage.above if kind in stage.all_kinds))

    def _begin(self, stage: Stage) -> None:
        theirs = {kind: self._sockets.pop(kind) for kind in stage.all_kinds}
        me = os.getpid()

        def be_stage() -> None:
            die_with(me)
            self._leave_behind()
            ForkServer(self._directory, stage, theirs).serve()

        self._stages[forked(be_stage)] = stage
        for listener in theirs.values():
            listener.close()

    def _answer(self, listener: socket.socket) -> None:
        proxy, _ = listener.accept()
        descriptors: list[int] = []  # its streams and its directory
        with proxy:
            try:
                proxy.settimeout(REQUEST_SECONDS)
                _, descriptors, *_ = socket.recv_fds(proxy, 1, 4)
                with proxy.makefile("rb") as words:
                    request = marshal.load(words)  # until it is whole, or the proxy is gone
                pid = forked(lambda: self._be_process(proxy, request, descriptors))
            except (OSError, ValueError, EOFError, TypeError) as error:  # the proxy was killed, perhaps
                return _log.warning("a process was not forked: %s: %s", type(error).__name__, error)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._processes[pid] = 0.0
            with contextlib.suppress(OSError):  # it is gone: the process ends too
                proxy.sendall(f"{pid}".encode())

    def _leave_behind(self) -> None:
        """Of what a fork has, the sockets of the stage."""
        for each in self._sockets.values():
            each.close()

    def _be_process(self, proxy: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
        self._leave_behind()
        os.setpgid(0, 0)
        *streams, directory = descriptors
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.fchdir(directory)  # which may have been removed
        os.close(directory)
        os.environ.clear()
        os.environ.update(request["environment"] | self._set)
        os.sched_setaffinity(0, request["cores"])
        if request["scheduling"] != os.sched_getscheduler(0):
            os.sched_setscheduler(0, request["scheduling"], os.sched_param(0))
        _forget()
        if self._anew or _read_at_start(request["environment"]) != _read_at_start(self._environment):
            os.set_inheritable(proxy.fileno(), True)
            words = [sys.executable, "-m", __spec__.name, "--proxy", str(proxy.fileno()), *request["words"]]
            os.execv(sys.executable, words)
        be_process(proxy, *request["words"])

    def _look_after_children(self) -> None:
        now = time.monotonic()
        for pid, ended in list(self._processes.items()):
            if ended and now > ended + LINGER_SECONDS:
                os.waitpid(pid, 0)
                del self._processes[pid]
            elif not ended and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._processes[pid] = now
        for pid, stage in list(self._stages.items()):
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                _log.error("the stage %s has ended; it begins again when it is needed", stage.name)
                del self._stages[pid]
                self._sockets |= {kind: listen(self._directory, kind) for kind in stage.all_kinds}


def be_process(proxy: socket.socket, directory: str, spawn: str, mesh: str, rank: str, log: str = "") -> NoReturn:
    """Be a process of a mesh from now on: tell the watch, then run Monarch."""
    die_with_peer(proxy.detach())
    die_with_owner(f"{directory}/life")
    set_title(f"titan_rl {mesh} rank {rank} ({spawn} of {directory})")
    if log:
        from titan_rl.supervision.process import redirect_output

        redirect_output(Path(log))
    for stop in (signal.SIGTERM, signal.SIGHUP):  # a job's scheduler sends them to all processes; the controller saves
        signal.signal(stop, lambda *_: None)  # not ignored: the programs that are started here would inherit that
        signal.siginterrupt(stop, False)
    from titan_rl.metrics.waits import answer_signals

    answer_signals(f"{mesh} rank {rank}")
    births = os.open(f"{directory}/births", os.O_WRONLY | os.O_NONBLOCK)  # fails where nobody reads it any more
    os.write(births, f"{spawn} {mesh} {rank} {os.getpid()}\n".encode())  # from now on it may be asked
    os.close(births)
    os.environ["HYPERACTOR_MESH_BOOTSTRAP_ENABLE_PDEATHSIG"] = "false"  # of a stage
    sys.argv = [MONARCH_MAIN]
    # without the teardown of the interpreter: with torch it takes 1 to 10 s, and the controller waits for it
    run_and_exit(functools.partial(runpy.run_module, MONARCH_MAIN, run_name="__main__", alter_sys=True))


def listen(directory: str, kind: str) -> socket.socket:
    """The socket through which processes of a kind are asked for, in the place of an earlier one."""
    place = f"{directory}/{kind}.fork"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    return listener


def set_title(title: str) -> None:
    """Show this in `ps`, in the place of the command line that started the fork server."""
    os.environ["SPT_NOENV"] = "1"  # do not write over the variables in /proc
    from setproctitle import setproctitle

    setproctitle(title)


def _forget() -> None:
    """Be as after a start in what Python and numpy keep for a process, and the stage has used."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, handlers=(), force=True)
    tempfile.tempdir = None
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


def main(directory: str, stage: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        die_with_owner(f"{directory}/life")
    except SystemExit:
        return  # a run that was over at once; nobody is told
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the controller's are blocked while it starts
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a job's scheduler sends them to all processes
        signal.signal(stop, lambda *_: None)
    root = msgspec.json.decode(stage, type=Stage)
    ForkServer(directory, root, {kind: listen(directory, kind) for kind in root.all_kinds}).serve()


if __name__ == "__main__":
    if sys.argv[1] == "--proxy":
        be_process(socket.socket(fileno=int(sys.argv[2])), *sys.argv[3:])
    main(*sys.argv[1:])
