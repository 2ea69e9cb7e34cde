"""The sending end of a connection, for either side of it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any


class Outbox:
    """Sends all items of one event-loop tick as one message. Belongs to one event loop."""

    def __init__(self, send: Callable[[bytes], None] | None = None) -> None:
        self._send = send
        self._waiting: list[tuple[Any, ...]] = []

    def open(self, send: Callable[[bytes], None]) -> None:
        """Start to send, beginning with the items that were put in before."""
        self._send = send
        self._flush()

    def put(self, item: tuple[Any, ...]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(item)

    def end(self) -> bool:
        """Send what is waiting, and that nothing follows. Returns whether there was a receiver."""
        self._flush()
        if self._send is not None:
            self._send(pickle.dumps(None))
        return self._send is not None

    def _flush(self) -> None:
        if self._send is not None and self._waiting:
            items, self._waiting = self._waiting, []
            self._send(pickle.dumps(items))
