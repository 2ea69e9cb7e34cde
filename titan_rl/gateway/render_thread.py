"""One thread for all that tokenizes: a long text must not hold up the answers of other calls.

- Jobs run one after the other, in the order in which they were given: renderers are not made for several threads.
- Jobs that are given while the thread is busy go to it together, and results come back together: with many streams, a
  journey to the thread for each token costs more than the work. No result waits for others longer than
  `RETURN_SECONDS`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

RETURN_SECONDS = 0.002

_Job = tuple[asyncio.Future[Any], Callable[[], Any]]


class RenderThread:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self._waiting: list[_Job] = []
        self._busy = False

    async def run(self, job: Callable[[], T]) -> T:
        """What `job` returns or raises. It does not run at all when the caller is cancelled before its turn."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        self._waiting.append((result, job))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._next_batch, loop)
        return await result

    def _next_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        batch, self._waiting = self._waiting, []
        self._busy = bool(batch)
        if batch:
            self._thread.submit(self._run, batch, loop)

    def _run(self, batch: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        """In the thread."""
        done: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        returned = time.monotonic()
        for result, job in batch:
            if result.cancelled():
                continue
            try:
                done.append((result, job(), None))
            except Exception as error:
                done.append((result, None, error))
            if (now := time.monotonic()) - returned > RETURN_SECONDS:
                loop.call_soon_threadsafe(_return, done)
                done, returned = [], now
        loop.call_soon_threadsafe(_return, done)
        loop.call_soon_threadsafe(self._next_batch, loop)


def _return(done: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
    for result, value, error in done:
        if result.cancelled():
            continue
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)
