"""Counts the bytes of every message that Monarch serialises or takes apart in this process.

`with counted() as counts` goes around everything, so that no message is awaited already when counting begins. What is
sent is counted as it was serialised; what was received, as it would be serialised again, because Monarch takes it apart
before Python sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from monarch._src.actor import actor_mesh
from monarch._src.actor.future import Future

from titan_rl.rpc import connection

_pickle = actor_mesh.pickle
_await = Future.__await__
_recv = connection.recv
_send = actor_mesh.Port.send
_prepare = actor_mesh._Actor._prepare


def _size(value: Any) -> int:
    return len(_pickle(value, allow_tensor_engine_references=False, allow_mesh_references=True).buffer())


def _watch(count: Callable[[str, int], None]) -> None:
    """Tell `count` about every message from now on: what it is, and its bytes."""

    def pickle(value: Any, *args: Any, **kwargs: Any) -> Any:
        state = _pickle(value, *args, **kwargs)
        count("sent", len(state.buffer()))
        return state

    def result(self: Future[Any]) -> Generator[Any, Any, Any]:
        value = yield from _await(self)
        count(f"received {type(value).__name__}", _size(value))
        return value

    async def recv(receiver: Any) -> Any:
        value = await _recv(receiver)
        count("received bytes", _size(value))
        return value

    def send(self: Any, value: Any) -> None:
        count("sent", _size(value))
        _send(self, value)

    def prepare(self: Any, ctx: Any, method: Any, message: Any, *rest: Any) -> Any:
        count("received", len(message))
        return _prepare(self, ctx, method, message, *rest)

    actor_mesh.pickle = pickle
    Future.__await__ = result  # type: ignore[method-assign]
    connection.recv = recv
    actor_mesh.Port.send = send  # type: ignore[method-assign]
    actor_mesh._Actor._prepare = prepare  # type: ignore[method-assign]


def _unwatch() -> None:
    actor_mesh.pickle = _pickle
    Future.__await__ = _await  # type: ignore[method-assign]
    connection.recv = _recv
    actor_mesh.Port.send = _send  # type: ignore[method-assign]
    actor_mesh._Actor._prepare = _prepare  # type: ignore[method-assign]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes in this process, while the block runs: `sent`, and `received` by type."""
    counts: Counter[str] = Counter()

    def count(what: str, nbytes: int) -> None:
        counts[what] += nbytes

    _watch(count)
    try:
        yield counts
    finally:
        _unwatch()
