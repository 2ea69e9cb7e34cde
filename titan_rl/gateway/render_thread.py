"""One thread that does what tokenizes: a long text must not hold up the answers of other calls.

- Works are done one after the other, in the order in which they were asked for: renderers are not made for several
  threads.
- What is asked for meanwhile goes to the thread together, and what was done comes back together: with many streams, a
  journey for each token costs more than the work. Nothing that is done waits longer than `RETURN_SECONDS` for the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

RETURN_SECONDS = 0.002


class _Asked(NamedTuple):
    work: Callable[[], Any]
    future: asyncio.Future[Any]


class _Done(NamedTuple):
    future: asyncio.Future[Any]
    value: Any
    error: Exception | None


class Reader:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self._waiting: list[_Asked] = []
        self._busy = False

    async def do(self, work: Callable[[], T]) -> T:
        """The value of `work`, or what it raises. Not done at all where the caller is cancelled before its turn."""
        loop = asyncio.get_running_loop()
        asked = _Asked(work, loop.create_future())
        self._waiting.append(asked)
        if not self._busy:
            self._busy = True
            loop.call_soon(self._start, loop)
        return await asked.future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        batch, self._waiting = self._waiting, []
        self._thread.submit(self._run, batch, loop)

    def _run(self, batch: Sequence[_Asked], loop: asyncio.AbstractEventLoop) -> None:
        """In the thread."""
        done: list[_Done] = []
        returned = time.monotonic()
        for work, future in batch:
            if future.cancelled():
                continue
            try:
                done.append(_Done(future, work(), None))
            except Exception as error:  # whatever it is, it is the caller's
                done.append(_Done(future, None, error))
            if (now := time.monotonic()) - returned > RETURN_SECONDS:
                loop.call_soon_threadsafe(_give_back, done)
                done, returned = [], now
        loop.call_soon_threadsafe(self._finish, done, loop)

    def _finish(self, done: Sequence[_Done], loop: asyncio.AbstractEventLoop) -> None:
        _give_back(done)
        self._busy = bool(self._waiting)
        if self._busy:
            self._start(loop)


def _give_back(done: Sequence[_Done]) -> None:
    for future, value, error in done:
        if future.cancelled():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
