"""The relays of test_relay.py, which need no torch."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from titan_rl.actors import relay as relaying
from titan_rl.actors.relay import WeightRelay
from titan_rl.processes import OWNER
from titan_rl.rpc.connection import endpoint
from titan_rl.weights.manifest import Publication

ELEMENTS = 1_500_000
CHUNKS = -(-4 * ELEMENTS // relaying.LEAST_CHUNK_BYTES)


class SpiedRelay(WeightRelay):
    """Counts the chunks that it hands on, and holds chunks back if it is told to."""

    def __init__(self, owner: int, host: str) -> None:
        os.environ[OWNER] = str(owner)
        super().__init__(host)
        self._handed = 0
        self._held_from = CHUNKS
        self._released = asyncio.Event()
        self._holds = asyncio.Event()
        self._frozen = False

    @endpoint
    async def open(self, publication: Publication) -> list[Any]:
        handles = await WeightRelay.open.answer(self, publication)
        return [Frozen()] * len(handles) if self._frozen else handles

    @endpoint
    async def freeze(self, frozen: bool) -> None:
        """Whether to read this relay's memory takes for ever."""
        self._frozen = frozen

    @endpoint
    async def arrived(self, serial: int, chunk: int) -> None:
        if chunk >= self._held_from:
            self._holds.set()
            await self._released.wait()
        await WeightRelay.arrived.answer(self, serial, chunk)
        self._handed += 1

    @endpoint
    async def hold(self, first: int) -> None:
        """Chunks from the first on."""
        self._held_from = first
        self._released.clear()
        self._holds.clear()

    @endpoint
    async def holds(self) -> None:
        """Returns when somebody waits for a chunk that is held back."""
        await self._holds.wait()

    @endpoint
    async def release(self) -> None:
        self._held_from = CHUNKS
        self._released.set()

    @endpoint
    async def handed(self) -> int:
        """Since the last time that it was asked."""
        handed, self._handed = self._handed, 0
        return handed

    @endpoint
    async def be_patient(self, seconds: int, slowest: int = 10 << 20) -> None:
        relaying.PATIENCE_SECONDS, relaying.SLOWEST_BYTES_PER_SECOND = seconds, slowest


class Frozen:
    """A handle on memory that cannot be read any more."""

    def read_into(self, part: memoryview, *, timeout: int) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()
