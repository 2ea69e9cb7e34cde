"""Calls that outlive the actors that they were made to: made again once those are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from titan_rl.errors import ActorGone

T = TypeVar("T")


class Lifeline:
    """Makes calls again when the actors behind a client were replaced.

    Args:
        seconds: how long a call waits for a replacement. None: as long as it takes. Only the owner of the actors knows
            how many more starts it will try; when it gives up, it ends whoever waits here.
    """

    def __init__(self, *, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._changed = asyncio.Event()

    def replaced(self) -> None:
        """New actors answer now: calls that wait are made again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def again(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `call()`. If the actors are gone before it has one, it is called again once they are replaced:
        a call that may be made twice.

        Raises:
            ActorGone: they were not replaced in time.
        """
        while True:
            changed = self._changed
            try:
                return await call()
            except ActorGone as gone:
                try:
                    async with asyncio.timeout(self._seconds):
                        await changed.wait()
                except TimeoutError:
                    raise gone from None
