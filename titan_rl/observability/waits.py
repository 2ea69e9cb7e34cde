"""SIGUSR1 asks a process what it is doing: it prints the stack of every thread, and every task with what it waits for.

    task Evaluations.run, 12.3 s old: 3.1 s in rollout0.run_groups; at connection.py:248 Connection._result < …

- The seconds of a wait are those of the innermost `waiting` block that the task is in. Every call to an actor and every
  span of a run is such a block. A task outside of all blocks shows its age only, and has waited for no longer.
- The signal is passed on to `processes.answering`, from the controller to every process of its run.
- A signal may come while a lock is held. So the answer is written to the descriptors, without logging.
- The answer needs the GIL. Native code that keeps it leaves SIGUSR1 unanswered; SIGUSR2 then prints the stacks without
  it. That reads frames while threads may change them, and has killed one process in some hundred busy ones: it is for
  a process that is stuck anyway, and it is not passed on.
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
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from titan_rl.observability.timeline import WatchedSelector
from titan_rl.processes import answering

T = TypeVar("T")

FRAMES = 6
"""Innermost frames that are printed of a task."""

_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()  # whose tasks know when they were born
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
    """Answer both signals from now on, on standard error. Call it in the main thread, before there is an event loop.

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
    faulthandler.register(signal.SIGUSR2, file=2)


def watch_event_loops() -> None:
    """From now on event loops of this process tell what their tasks wait for, and the timeline when they wait."""
    asyncio.set_event_loop_policy(WatchedEventLoops())


def report(name: str) -> str:
    """What every task of this process waits for, the oldest first, and the names of the threads."""
    now = time.monotonic()
    waits = {task: (now - since, what) for task, since, what in tuple(_waits.values())}
    living = [
        (now - born, task)
        for loop in tuple(_loops)
        for task in asyncio.all_tasks(loop)
        if (born := getattr(task, "born", None)) is not None  # a library may make tasks of its own
    ]
    tasks = sorted(living, key=lambda each: -each[0])
    names = ", ".join(f"{thread.name} 0x{thread.ident or 0:016x}" for thread in threading.enumerate())
    lines = [f"{name} (pid {os.getpid()}) has {len(tasks)} tasks; its threads: {names}"]
    return "\n".join(lines + [_line(task, age, waits.get(task)) for age, task in tasks]) + "\n"


def _line(task: asyncio.Task[Any], age: float, wait: tuple[float, Callable[[], str]] | None) -> str:
    frames = list(_frames(task.get_coro()))
    where = " < ".join(frames[: -FRAMES - 1 : -1])
    name = getattr(task.get_coro(), "__qualname__", task.get_name())
    return f"task {name}, {age:.1f} s old: {f'{wait[0]:.1f} s in {_words(wait[1])}; ' if wait else ''}at {where}"


def _words(what: Callable[[], str]) -> str:
    try:
        return what()
    except Exception as error:  # the state that it describes belongs to another thread
        return f"{type(error).__name__}: {error}"


def _frames(coroutine: Any) -> Iterator[str]:
    """Where a suspended coroutine is, the outermost frame first."""
    while coroutine is not None:
        for kind, awaited in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            if (frame := getattr(coroutine, f"{kind}_frame", None)) is not None:
                yield f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_qualname}"
                coroutine = getattr(coroutine, awaited)
                break
        else:
            return


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
    """Event loops whose tasks are known with their births, and whose waits are timed, whoever makes the loops."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(WatchedSelector())
        loop.set_task_factory(_note_birth)
        _loops.add(loop)
        return loop


def _note_birth(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
) -> asyncio.Task[T]:
    task = asyncio.Task(work, loop=loop, **options)
    task.born = time.monotonic()  # type: ignore[attr-defined]  # a table of all tasks would cost more than the task
    return task
