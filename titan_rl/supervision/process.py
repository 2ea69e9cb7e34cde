"""One process: its environment, its log file, its scratch directory, and the controller's signal handlers.

- The controller prepares itself before it imports Monarch, every other process before any actor starts.
- Everything that a process prints, Python or native, goes to its own log file. The terminal belongs to the controller.
- The scratch directory holds files that must not outlive the process: sockets, rendezvous files, temporary files. The
  process holds a lock on it, which the kernel releases when the process dies. The next process removes the directories
  of dead ones.
- `hold_signals` blocks signals until `report_stop_signals` handles them, because before that there is no event loop.
  The first SIGINT, SIGTERM or SIGHUP ends the running work; saving the weights and closing still follow. Each further
  signal only skips the saving. No signal interrupts the closing or kills this process: the handlers stay until
  `processes.run_and_exit` ends it.
"""

import asyncio
import atexit
import contextlib
import fcntl
import functools
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from titan_rl.errors import Stopped, TitanError
from titan_rl.importing import import_user_module
from titan_rl.metrics.timeline import SPANS, timeline
from titan_rl.processes import HOST

PREFIX = "titan_rl-"
LONGEST_PARENT = 40
"""Bytes. A longer TMPDIR is not used: a socket's path may have 107 bytes, and Monarch and vLLM append up to 63."""

OPEN_FILES = 1 << 16
"""To which a run raises the limit of its processes, as far as it may."""

SUPERVISION_ENVIRONMENT = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "10s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "1d",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "1d",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "3d",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "1d",
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "1d",
}
"""Set in every process, the controller too, before Monarch is imported.

- Monarch looks for failed actors every 10 s, because each look leaves some bytes in the controller for good.
- It never takes a silent process for dead, as it would after 30 s: a process may be stopped by SIGSTOP or a debugger,
  or its laptop sleep. The kernel reports the end of a process instead (`supervision.process_watch`), and every call
  has its own time limit. The watchdog must be longer than both idle times together.
- No process ends because it cannot return an answer to a dead sender, as it would after 30 s, even if nobody waits for
  that answer."""

TCP_ONLY = {"MONARCH_RDMA_DISABLE_IBVERBS": "1"}
"""What a process of `placement.rdma = "off"` has. Monarch reads it at its first transfer, for good. A process that uses
RDMA reads by TCP from one that does not, and the other way round."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def prepare_controller() -> None:
    """Call before anything that imports Monarch."""
    if "monarch" in sys.modules and not SUPERVISION_ENVIRONMENT.items() <= os.environ.items():
        logging.getLogger(__name__).warning(
            "monarch was imported before titan_rl: a process that is stopped for 30 s will be taken for dead"
        )
    os.environ.update(SUPERVISION_ENVIRONMENT)
    # Monarch's own log is one file of all runs, in the temporary directory, that nobody cuts: by default (`info`)
    # megabytes of each run, now its errors.
    os.environ.setdefault("MONARCH_FILE_LOG", "error")
    # Monarch hangs without a word where a process may open no more files.
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, OPEN_FILES if most < 0 else min(OPEN_FILES, most)), most))
    # All processes of this host inherit it. Where they share cores, a message to one does not interrupt another in its
    # work: a step takes a tenth less. Beside a GPU it would only wake those late that feed it.
    if os.path.exists("/dev/nvidiactl"):
        return
    with contextlib.suppress(OSError):  # a container may forbid either call
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def send_while_importing() -> None:
    """Let threads send messages by Monarch at the moment when another one has imported torch. The first message makes
    Monarch's pickler for torch. Until then it was None, and what other threads sent failed with a TypeError."""
    from monarch._src.actor import pickle

    pickle._TorchPickler = pickle._TorchPickler or pickle.cloudpickle.Pickler


def prepare_process(mesh: str, log_directory: str, imports: tuple[str, ...], spans: bool = False) -> None:
    """Begin the process's timeline in `SPANS` beside the logs, if there are both, and import the user's modules in
    order, under the names that pickles refer to."""
    send_while_importing()
    if log_directory and spans:
        rank, host = int(os.environ.get("RANK", "0")), os.environ.get(HOST, "")
        timeline.begin(Path(log_directory).parent / SPANS, mesh, rank=rank, host=host)
    for name in imports:
        import_user_module(name)


@functools.cache
def scratch_directory() -> Path:
    """The scratch directory. It is made at the first call and removed when this process exits."""
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > LONGEST_PARENT:
        parent = Path("/tmp")
    sweep_dead_scratch(parent)
    # It gets its final name, which other processes look for, only once it is locked.
    made = Path(tempfile.mkdtemp(prefix=".", dir=parent))
    fcntl.flock(os.open(made, os.O_RDONLY), fcntl.LOCK_EX)  # for as long as this process lives
    directory = made.rename(parent / f"{PREFIX}{os.getpid()}{made.name}")
    atexit.register(_remove, directory, os.getpid())
    return directory


def _remove(directory: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not in a fork
        shutil.rmtree(directory, ignore_errors=True)


def sweep_dead_scratch(parent: Path) -> None:
    """Remove the scratch directories of this user's dead processes."""
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another process swept it first, or it is another user's
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(descriptor)


def hold_signals() -> None:
    """Block stop signals until `report_stop_signals`. Call it in the main thread, before any process is spawned."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def report_stop_signals(report: Callable[[TitanError], None]) -> None:
    """From now on report each signal as `Stopped`, in the main thread, even while the event loop sleeps. Call it in the
    main thread, in the event loop of the run."""
    # The kernel may interrupt any thread. The byte wakes the event loop, whose thread then runs the handler.
    # `loop.add_signal_handler` does the same, but removes its handlers when the loop is closed.
    waking, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # never closed: signals come until this process ends
    asyncio.get_running_loop().add_reader(waking, os.read, waking, 64)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    for number in _SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has set it
            signal.signal(number, lambda number, frame: report(Stopped(number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


class _Lasting:
    """A stream that drops what nobody reads any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, a terminal or pipe that is closed without a signal, as that of a background job, ends nothing."""
    output, errors = (cast(TextIO, _Lasting(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        yield


_log = logging.getLogger(__name__)

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def redirect_output(file: Path) -> None:
    """Send this process's standard output and error, and its logging, to `file` (appended)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, force=True)


def log_to_file(file: Path) -> None:
    """Send the controller's logging to `file`, with what its threads raise; its output stays in the terminal."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    threading.excepthook = _log_thread


def _log_thread(failed: threading.ExceptHookArgs) -> None:
    """A library's thread that dies (TensorBoard's, on a full disk) is no news for the terminal. Our own tell those who
    rely on them (`processes.start_thread`)."""
    if failed.exc_value is not None:
        _log.error("thread %s failed", failed.thread, exc_info=failed.exc_value)
