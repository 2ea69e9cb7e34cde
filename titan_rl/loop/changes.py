"""How the tasks of a loop wait for each other: each says what it has changed, and all that wait look again."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from titan_rl.metrics.activity import Activities
from titan_rl.view.display import RunDisplay

T = TypeVar("T")


class Changes:
    def __init__(self, display: RunDisplay, activity: Activities) -> None:
        self.activity = activity
        self._display = display
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks after a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(
        self, task: str, why: Callable[[], str], ready: Callable[[], T], over: Callable[[], bool] = lambda: False
    ) -> T | None:
        """Wait until `ready` returns something true, and return it. None: it is `over`. Both are called again after
        every change by a task."""
        if over():
            return None
        if not (value := ready()):
            with self.activity(task, waits_for=why):
                while not (value := ready()):
                    await self._changed.wait()
                    if over():
                        return None
        return value

    def say(self, what: str) -> None:
        self._display.print_line(what)

    def warn(self, what: str) -> None:
        self._display.print_line(what, logging.WARNING)
