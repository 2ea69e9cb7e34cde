"""Processes: end one with its parent, say how one ended, exit without delay, watch its threads, and join the ranks of
one mesh. Standard library only; `join_world` imports torch when it is called.
"""

import atexit
import ctypes
import fcntl
import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)

answering: set[int] = set()
"""Descriptors (pidfd) of children that answer SIGUSR1. It is passed on to them (`metrics.waits`)."""


def process_control(option: int, value: int) -> None:
    """Linux's `prctl`. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, whatever else runs here meanwhile. A parent that died
    before this call kills nothing, so a process whose parent is another one ends here."""
    process_control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent died while its child process started")


_F_SETSIG = 10


def die_with_peer(descriptor: int) -> None:
    """Have the kernel kill this process when nobody has the other end of a connection or pipe open any more, over which
    nothing is sent. If nobody has it open now, this process ends. The descriptor stays open."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    try:
        os.read(descriptor, 1)  # an end of file, unless there is a peer
    except BlockingIOError:
        return
    except ConnectionError:  # it died before it had read all that it was sent
        pass
    sys.exit("the process that this one depends on died while it started")


def die_with_owner(life: str) -> None:
    """The same for those that have the named pipe `life` open for writing."""
    try:
        pipe = os.open(life, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # no file any more
        sys.exit("the owner died while its process started")
    die_with_peer(pipe)


def forked(work: Callable[[], object]) -> int:
    """Fork a process that does this and ends, whatever it raises: a fork must never go on with the work of the process
    that it was forked from. Returns its id. Raises OSError: there can be none."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as end:
        if isinstance(end, SystemExit) and isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            traceback.print_exc()
    finally:
        os._exit(code)


def ending_in_words(code: int) -> str:
    """How a process ended; a signal is a negative code, as `subprocess` gives it."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


NEW_OBJECTS = 50_000
"""After so many the garbage collector looks for garbage among them. After 700, Python's own number, it takes a sixth of
the time in which vLLM is imported, because all objects that are made then stay. After 10,000 it takes a sixth of a
rollout worker's time: a step of 256 rollouts makes more, nearly all of which are freed without it. In runs of 40 s no
process grew by more than 8 MiB."""


def run_and_exit(main: Callable[[], object]) -> NoReturn:
    """Run a program and end this process with its exit code, its `atexit` work done.

    The interpreter is not torn down. With torch in it that takes 1 to 10 s, signals have their deadly default again
    meanwhile, and a thread of Monarch's that comes back to Python aborts the process (SIGABRT, "FATAL: exception not
    rethrown").
    """
    gc.set_threshold(NEW_OBJECTS)
    code = 1
    try:
        try:
            result = main()
            code = result if isinstance(result, int) else 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except KeyboardInterrupt:  # before a run has armed its handlers
            code = 128 + signal.SIGINT
        except BrokenPipeError:  # `| head` has read enough
            code = 128 + signal.SIGPIPE
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever the words above met, a terminal that is gone for one
        os._exit(code)


def start_thread(name: str, work: Callable[[], object], *, on_death: Callable[[str], object]) -> threading.Thread:
    """Start a daemon thread on which others rely: `on_death` is told, in that thread, what `work` has raised."""

    def watched() -> None:
        try:
            work()
        except BaseException as error:
            _log.exception("thread %s ended", name)
            on_death(f"thread {name} ended: {type(error).__name__}: {error}")

    thread = threading.Thread(target=watched, name=name, daemon=True)
    thread.start()
    return thread


HOST = "TITAN_RL_HOST"
"""Variable with the name of this process's host in its run."""

OWNER = "TITAN_RL_OWNER"
"""Variable with a process id; see `owner_pid`."""


def owner_pid() -> int:
    """The process whose death makes the files in this host's shared memory rubbish: the controller on its own host, its
    agent on every other one. A process that nobody told of an owner is its own."""
    return int(os.environ.get(OWNER, os.getpid()))


RENDEZVOUS = "TITAN_RL_RENDEZVOUS"
"""Variable with the place where the ranks of a mesh meet, a new one each time: the path of a file in a private
directory; for ranks on several hosts the IP address of rank 0's host, and after `open_rendezvous` `tcp://ADDRESS:PORT`."""

_store: Any = None  # of rank 0, of a mesh over several hosts


def open_rendezvous() -> str:
    """On rank 0, before `join_world` on any rank: open the place where ranks on several hosts meet, on one network
    interface and a free port. Returns what every rank must set RENDEZVOUS to."""
    global _store
    if "/" in (place := os.environ[RENDEZVOUS]):
        return place
    import torch.distributed as dist

    with socket.create_server((place, 0)) as server:
        port = server.getsockname()[1]
        _store = dist.TCPStore(place, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    return f"tcp://{place}:{port}"


def join_world(backend: str) -> None:
    """Start the default process group of torch.distributed, if there is none, without a port.

    RANK, WORLD_SIZE and, for more than one rank, RENDEZVOUS must be in the environment. The ranks of one host meet over
    a file, because torch's usual store is a TCP server of rank 0 that listens on every interface and serves anyone.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = os.environ.get(RENDEZVOUS, "")
    if place.startswith("tcp://"):
        address, port = place.removeprefix("tcp://").split(":")
        store = _store or dist.TCPStore(address, int(port))
    else:
        store = dist.HashStore() if ranks == 1 else dist.FileStore(place, ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
