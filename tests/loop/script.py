"""Gates that a test holds and opens, in one process and without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TURNS_UNTIL_STILL = 300
"""Of the event loop; nothing here waits for anything but other tasks, so then whoever can go on has done so."""


async def settle() -> None:
    for _ in range(TURNS_UNTIL_STILL):
        await asyncio.sleep(0)


class Script:
    """Gates, what passed them, and the errors that wait behind some."""

    def __init__(self) -> None:
        self.holds: Callable[[str], bool] = lambda gate: False
        self.errors: dict[str, list[BaseException]] = {}
        """By gate: raised one by one by those who pass."""
        self.events: list[str] = []
        """"gate" when somebody arrives, "gate done" when it passes."""
        self.cancelled: list[str] = []
        self._closed: dict[str, asyncio.Event] = {}

    async def gate(self, name: str) -> None:
        self.events.append(name)
        if self.holds(name):
            self._closed[name] = asyncio.Event()
            try:
                await self._closed[name].wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            finally:
                del self._closed[name]
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        self.events.append(f"{name} done")

    @property
    def held(self) -> list[str]:
        """Gates where somebody waits."""
        return list(self._closed)

    async def open(self, *names: str) -> None:
        """Let those pass who wait there, and everything that follows happen."""
        for name in names:
            self._closed[name].set()
        await settle()

    def at(self, event: str) -> int:
        """When it happened, among all events."""
        return self.events.index(event)
