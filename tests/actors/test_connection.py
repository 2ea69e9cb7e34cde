"""Calls over one connection: their outcomes, their errors, and what is left of them (real processes, 10 s)."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monarch.actor
import pytest
from monarch.actor import default_bootstrap_cmd, this_host

from titan_rl.errors import ActorFailed, ActorGone, CallTimeout, RequestError
from titan_rl.rpc.connection import ConnectedActor, Connection, bounded, endpoint
from titan_rl.rpc.mesh_client import MeshClient

SECONDS = 60.0
HERE = str(Path(__file__).parent)


class _Allocator(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def allocated_bytes() -> int:
    """Bytes that this process has allocated and not freed, Python's and Monarch's."""
    gc.collect()
    mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo.restype = _Allocator
    numbers = mallinfo()
    return numbers.uordblks + numbers.hblkhd


class Echo(ConnectedActor):
    """Answers, refuses, breaks, or never answers."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def echo(self, value: object) -> object:
        return value

    @endpoint
    async def refuse(self) -> None:
        raise RequestError("not this one")

    @endpoint
    async def break_down(self) -> None:
        raise ValueError("seven")

    @endpoint
    async def interrupted(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def never(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def allocated(self) -> int:
        return allocated_bytes()

    @endpoint
    async def count(self) -> int:
        """How often this was called."""
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls

    async def hidden(self) -> None:
        """No endpoint."""

    @endpoint
    async def tasks(self) -> int:
        return len(asyncio.all_tasks())

    @endpoint
    async def unpicklable(self) -> object:
        return lambda: None

    @endpoint
    async def torn(self) -> object:
        return Torn()


def _torn() -> None:
    raise ValueError("torn")


class Torn:
    """Can be pickled and not unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _torn, ()


class Other(ConnectedActor):
    @endpoint
    async def hidden(self) -> None:
        """`Echo` has no endpoint of this name."""


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    monarch.actor.unhandled_fault_hook = lambda failure: None  # a fault may be heard after its test
    path = os.pathsep.join([HERE, *sys.path])  # the actor's process has to find this module
    mesh = this_host().spawn_procs(
        per_host={"ranks": 1},
        name="echo",
        bootstrap_command=lambda point: default_bootstrap_cmd().with_env({"PYTHONPATH": path}),
    )
    yield Connection(mesh.spawn("echo", Echo), what="echo.{} of rank 0")
    await mesh.stop()


async def test_calls_have_their_own_outcomes_in_any_order_of_their_ends(connection: Connection) -> None:
    slow = asyncio.create_task(connection.call(None, Echo.never))
    values = await asyncio.gather(*(connection.call(SECONDS, Echo.echo, value) for value in range(100)))
    assert values == list(range(100))
    slow.cancel()
    assert await connection.call(SECONDS, Echo.echo, value="after") == "after"


async def test_a_call_is_made_although_whoever_made_it_is_cancelled_at_once(connection: Connection) -> None:
    """A trainer's calls are numbered, and its ranks refuse a number that is not the next: none may be missing."""
    abandoned = asyncio.create_task(connection.call(SECONDS, Echo.count))
    abandoned.cancel()
    assert await connection.call(SECONDS, Echo.count) == 2


@pytest.mark.parametrize("ticks", range(5))
async def test_a_caller_that_is_cancelled_just_when_its_outcome_comes_is_cancelled(ticks: int) -> None:
    """Else a task of a group that ends would go on for ever, and the group would wait for it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[int] = loop.create_future()
    silent = SimpleNamespace(connect=SimpleNamespace(call_one=lambda address: loop.create_future()))
    connection = Connection(silent, what="nobody.{}")

    async def ends_as_told(call: Coroutine[Any, Any, int], come: Callable[[], None]) -> bool:
        """Whether the caller ends cancelled exactly if the cancellation came before its end."""
        caller = asyncio.create_task(call)
        await asyncio.sleep(0)
        come()
        for _ in range(ticks):
            await asyncio.sleep(0)
        cancelled = caller.cancel()
        await asyncio.wait([caller])
        return cancelled == caller.cancelled()

    assert await ends_as_told(bounded(outcome, what="echo", seconds=SECONDS), lambda: outcome.set_result(1))
    call = connection.call(SECONDS, Echo.echo, 1)
    assert connection._link is not None
    [outcome] = connection._link.open.values()
    assert await ends_as_told(call, lambda: outcome.set_result(1))
    await connection.close()


async def test_errors_say_who_was_called_and_why_it_failed(connection: Connection) -> None:
    with pytest.raises(RequestError, match="^not this one$"):
        await connection.call(SECONDS, Echo.refuse)
    with pytest.raises(ActorFailed, match="^echo.break_down of rank 0 raised ValueError: seven$"):
        await connection.call(SECONDS, Echo.break_down)
    with pytest.raises(ActorFailed, match="^echo.interrupted of rank 0 raised CancelledError"):
        await connection.call(SECONDS, Echo.interrupted)
    with pytest.raises(ActorFailed, match="^Echo has no endpoint hidden$"):
        await connection.call(SECONDS, Other.hidden)
    with pytest.raises(CallTimeout, match="^echo.never of rank 0: no answer within 0.01 s$"):
        await connection.call(0.01, Echo.never)


async def test_what_cannot_be_pickled_or_unpickled_fails_its_own_call_at_either_end(connection: Connection) -> None:
    waiting = asyncio.create_task(connection.call(None, Echo.never))
    with pytest.raises(ActorFailed, match="^echo.echo of rank 0 raised ValueError: torn$"):
        await connection.call(SECONDS, Echo.echo, Torn())
    with pytest.raises(ActorFailed, match="^echo.torn of rank 0 answered what cannot be unpickled: ValueError: torn$"):
        await connection.call(SECONDS, Echo.torn)
    with pytest.raises(ActorFailed, match="^echo.unpicklable of rank 0 raised .*pickle"):
        await connection.call(SECONDS, Echo.unpicklable)
    assert await connection.call(SECONDS, Echo.echo, 1) == 1 and not waiting.done()
    waiting.cancel()


async def test_a_call_without_an_outcome_that_fails_fails_what_is_open(connection: Connection) -> None:
    """Else whoever waits for what it was to push would wait for ever."""
    waiting = asyncio.create_task(connection.call(None, Echo.never))
    await connection.call(SECONDS, Echo.echo, 0)
    connection.tell(Echo.break_down)
    with pytest.raises(ActorFailed, match="a call without an outcome failed: .*seven"):
        await asyncio.wait_for(waiting, SECONDS)
    assert await connection.call(SECONDS, Echo.echo, 1) == 1


async def test_a_client_that_leaves_leaves_nothing_behind(connection: Connection) -> None:
    before = await connection.call(SECONDS, Echo.tasks)
    for _ in range(3):
        other = Connection(connection._actor, what="other.{}")
        await other.call(SECONDS, Echo.echo, 0)
        await other.close()
    async with asyncio.timeout(SECONDS):
        while await connection.call(SECONDS, Echo.tasks) > before:
            pass  # each look is a round trip


async def test_open_and_new_calls_fail_when_the_process_is_gone(connection: Connection) -> None:
    pid = await connection.call(SECONDS, Echo.pid)
    waiting, gone = asyncio.create_task(connection.call(None, Echo.never)), asyncio.create_task(connection.gone())
    await connection.call(SECONDS, Echo.echo, 0)  # `never` has arrived before
    assert not gone.done()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorFailed, match="^echo.never of rank 0: the process or actor is gone"):
        await asyncio.wait_for(waiting, SECONDS)
    with pytest.raises(ActorGone, match="^echo.memory of rank 0: the process or actor is gone"):
        await asyncio.wait_for(gone, SECONDS)
    with pytest.raises(ActorFailed, match="^echo.echo of rank 0: the process or actor is gone"):
        await connection.call(SECONDS, Echo.echo, 0)


async def test_nothing_is_kept_of_calls_that_are_over(connection: Connection) -> None:
    """One call of Monarch's own keeps about 1,000 bytes in the caller and 300 in the actor."""

    async def calls(count: int) -> None:
        for _ in range(count // 100):
            await asyncio.gather(*(connection.call(SECONDS, Echo.echo, 0) for _ in range(100)))

    await calls(5_000)
    here, there = allocated_bytes(), await connection.call(SECONDS, Echo.allocated)
    await calls(30_000)
    assert (allocated_bytes() - here) / 30_000 < 150
    assert (await connection.call(SECONDS, Echo.allocated) - there) / 30_000 < 100


async def test_what_is_lost_fails_at_once_and_goes_on_with_its_replacement(connection: Connection) -> None:
    actor = connection._actor
    waiting = asyncio.create_task(connection.call(None, Echo.never))
    await connection.call(SECONDS, Echo.echo, 0)
    connection.lose("a test says so")
    with pytest.raises(ActorGone, match="^echo.never of rank 0: a test says so$"):
        await waiting
    with pytest.raises(ActorGone, match="^echo.echo of rank 0: a test says so$"):
        await connection.call(SECONDS, Echo.echo, 0)
    connection.replace(actor)
    assert await connection.call(SECONDS, Echo.echo, 1) == 1


async def test_a_call_that_may_be_made_twice_is_made_again_when_its_actor_was_replaced(connection: Connection) -> None:
    mesh = MeshClient("echo", [connection._actor])
    mesh.lose("a test says so")
    waiting = asyncio.create_task(mesh.retry_on_replacement(lambda: mesh.ranks[0].call(SECONDS, Echo.echo, 1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    mesh.replace([mesh.actor])
    assert await waiting == 1
    with pytest.raises(ActorFailed, match="raised ValueError: seven"):  # no reason to call it twice
        await mesh.retry_on_replacement(lambda: mesh.ranks[0].call(SECONDS, Echo.break_down))
    await mesh.ranks[0].close()
    unreplaced = MeshClient("echo", [mesh.actor], is_replaced=False)
    unreplaced.lose("nobody replaces it")
    with pytest.raises(ActorGone, match="nobody replaces it"):
        await unreplaced.retry_on_replacement(lambda: unreplaced.ranks[0].call(SECONDS, Echo.echo, 1))
