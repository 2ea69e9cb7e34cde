"""SIGUSR1 asks a process what it is doing: it prints the stack of every thread, and every task with what it waits for.

    task Evaluations.run at connection.py:248: 3.1 s in rollout0.run_groups

- The seconds of a wait are those of the innermost `waiting` block that the task is in. Every call to an actor and every
  span of a run is such a block.
- The signal is passed on to `processes.answering`, from the controller to every process of its run.
- A signal may come while a lock is held. So the answer is written to the descriptors, without logging.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_rl.observability.timeline import WatchedSelector
from titan_rl.processes import answering

_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_waits: dict[object, tuple[asyncio.Task[Any] | None, float, Callable[[], str]]] = {}  # the innermost of a task is last


@contextmanager
def waiting(what: Callable[[], str]) -> Iterator[None]:
    """The running task waits for something, for the length of the block.

    Args:
        what: says for what, whenever somebody asks; from any thread.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    key = object()
    _waits[key] = (task, time.monotonic(), what)
    try:
        yield
    finally:
        del _waits[key]


def answer_signals(name: str, *, log: Path | None = None) -> None:
    """Answer from now on, on standard error. Call it in the main thread, before there is an event loop.

    Args:
        name: of the process.
        log: a file for the same answer, in the directory where the other processes have theirs.
    """

    def answer(number: int, frame: object) -> None:
        asked = [_ask(descriptor) for descriptor in tuple(answering)]
        where = "" if log is None else f" in {log.parent}"
        try:
            said = report(name)
        except Exception as error:  # it would end what the main thread is doing
            said = f"{name}: the tasks cannot be told: {type(error).__name__}: {error}\n"
        said += f"{sum(asked)} more processes answer{where}\n" if asked else ""
        _write(2, said)
        if log is not None:
            with contextlib.suppress(OSError):  # the run directory is gone
                descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
                _write(descriptor, said)
                os.close(descriptor)

    watch_event_loops()
    signal.signal(signal.SIGUSR1, answer)


def watch_event_loops() -> None:
    """From now on the tasks of this process are known, and the timeline is told when its event loops wait."""
    asyncio.set_event_loop_policy(WatchedEventLoops())


def report(name: str) -> str:
    """Where every task of this process is and what it waits for, and the names of the threads."""
    now = time.monotonic()
    waits = {task: f": {now - since:.1f} s in {what()}" for task, since, what in tuple(_waits.values())}
    tasks = [task for loop in tuple(_loops) for task in asyncio.all_tasks(loop)]
    names = ", ".join(f"{thread.name} 0x{thread.ident or 0:016x}" for thread in threading.enumerate())
    lines = [f"{name} (pid {os.getpid()}) has {len(tasks)} tasks; its threads: {names}"]
    return "\n".join(lines + [f"task {_place(task.get_coro())}{waits.get(task, '')}" for task in tasks]) + "\n"


def _place(work: Any) -> str:
    """The name of a suspended coroutine, and the innermost line that it is at."""
    inner = work
    while hasattr(awaited := getattr(inner, "cr_await", None), "cr_frame"):
        inner = awaited
    frame = getattr(inner, "cr_frame", None)
    place = f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""
    return f"{getattr(work, '__qualname__', work)}{place}"


def _ask(descriptor: int) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
    except OSError:  # it has ended
        return False
    return True


def _write(descriptor: int, text: str) -> None:
    """The stacks, then the text."""
    faulthandler.dump_traceback(descriptor)
    rest = text.encode(errors="replace")
    with contextlib.suppress(OSError):  # the terminal is gone, or the disk is full
        while rest:
            rest = rest[os.write(descriptor, rest) :]


class WatchedEventLoops(asyncio.DefaultEventLoopPolicy):
    """Event loops whose tasks are known and whose waits are timed, whoever makes the loops."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(WatchedSelector())
        _loops.add(loop)
        return loop
