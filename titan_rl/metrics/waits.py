"""SIGUSR1 asks a process where it is: it prints the stack of every thread, and of every task the lines that it is at.

    task TrainingLoop._evaluate at loop.py:324, router_client.py:71, connection.py:271

- The signal is passed on to `processes.answering`, from the controller to every process of its run.
- A signal may come while a lock is held. So the answer is written to the descriptors, without logging.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

from titan_rl.metrics.timeline import WatchedSelector
from titan_rl.processes import answering

_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def answer_signals(name: str, *, log: Path | None = None) -> None:
    """Answer from now on, on standard error. Call it in the main thread, before there is an event loop. `log`: a file
    for the same answer, in the directory where the other processes have theirs."""

    def answer(number: int, frame: object) -> None:
        asked = 0
        for descriptor in tuple(answering):
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
                asked += 1
        where = "" if log is None else f" in {log.parent}"
        try:
            said = report(name)
        except Exception as error:  # it would end what the main thread is doing
            said = f"{name}: the tasks cannot be told: {type(error).__name__}: {error}\n"
        said += f"{asked} more processes answer{where}\n" if asked else ""
        _write(2, said)
        if log is not None:
            with contextlib.suppress(OSError):  # the run directory is gone
                descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
                _write(descriptor, said)
                os.close(descriptor)

    asyncio.set_event_loop_policy(WatchedEventLoops())  # its tasks are known, and the timeline learns when they wait
    signal.signal(signal.SIGUSR1, answer)


def report(name: str) -> str:
    """Where every task of this process is, and the names of the threads."""
    tasks = [task for loop in tuple(_loops) for task in asyncio.all_tasks(loop)]
    names = ", ".join(f"{thread.name} 0x{thread.ident or 0:016x}" for thread in threading.enumerate())
    lines = [f"{name} (pid {os.getpid()}) has {len(tasks)} tasks; its threads: {names}"]
    return "\n".join(lines + [f"task {_place(task.get_coro())}" for task in tasks]) + "\n"


def _place(work: Any) -> str:
    """The name of a suspended coroutine, and the lines that it and those that it awaits are at."""
    name, lines = getattr(work, "__qualname__", work), []
    while (frame := getattr(work, "cr_frame", None)) is not None:
        lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        work = work.cr_await
    return f"{name} at {', '.join(lines)}"


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
