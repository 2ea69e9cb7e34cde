"""`RemoteStore`: a rollout worker's sample store, read from the threads of another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from titan_rl.actors.connection import Connection
from titan_rl.actors.rollout_worker import RolloutWorker
from titan_rl.data_plane.rdma import FETCH_SECONDS

T = TypeVar("T")


class RemoteStore:
    """See `data_plane.rdma.ExposingStore`. Made in the event loop of the actor whose threads use it."""

    def __init__(self, worker: Any, name: str) -> None:
        self._connection = Connection(worker, what=f"{{}} of store {name}")
        self._loop = asyncio.get_running_loop()

    def expose(self, ids: tuple[int, ...]) -> tuple[Any, int]:
        return self._wait(lambda: self._connection.call(FETCH_SECONDS, RolloutWorker.expose, ids))

    def withdraw(self, token: int) -> None:
        self._wait(lambda: self._connection.call(FETCH_SECONDS, RolloutWorker.withdraw, token))

    def _wait(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def made_in_the_loop() -> T:
            return await call()

        return asyncio.run_coroutine_threadsafe(made_in_the_loop(), self._loop).result(FETCH_SECONDS)
