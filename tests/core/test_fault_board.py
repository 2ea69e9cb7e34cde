"""A fault ends the work in hand; none is lost."""

import asyncio
from threading import Thread

import pytest

from titan_rl.controller.faults import FaultBoard
from titan_rl.errors import ActorFailed, GeneratorFailed, MeshFailed, Stopped


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_fault_from_another_thread_ends_the_work() -> None:
    board = FaultBoard()
    watching = asyncio.create_task(board.watch(forever()))
    Thread(target=board.report, args=(ActorFailed("mesh generator0 failed"),)).start()
    with pytest.raises(ActorFailed, match="mesh generator0 failed"):
        await watching


async def test_a_fault_that_came_before_is_raised_by_the_next_watch() -> None:
    board = FaultBoard()
    board.report(ActorFailed("early"))
    with pytest.raises(ActorFailed, match="early"):
        await board.watch(forever())


async def test_the_works_own_error_says_more_and_wins() -> None:
    board = FaultBoard()

    async def work() -> None:
        board.report(ActorFailed("mesh generator0 failed"))
        await asyncio.sleep(0)
        raise GeneratorFailed("generator0 rank 1: lockstep lost")

    with pytest.raises(GeneratorFailed, match="lockstep lost"):
        await board.watch(work())


async def test_without_a_fault_the_result_comes_through() -> None:
    async def work() -> int:
        return 7

    assert await FaultBoard().watch(work()) == 7


async def test_cancelling_the_watch_cancels_the_work() -> None:
    board = FaultBoard()
    started = asyncio.Event()
    cancelled = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    watching = asyncio.create_task(board.watch(work()))
    await started.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert cancelled.is_set()


async def test_what_needs_a_mesh_ends_with_it_and_is_not_asked_any_more() -> None:
    board = FaultBoard()
    asked = []

    async def ask() -> None:
        asked.append(1)
        await forever()

    waiting = asyncio.create_task(board.unless_lost("trainer", ask()))
    board.report(MeshFailed("generator0 was killed", "generator0"))
    board.report(MeshFailed("trainer was killed", "trainer"), ends=False)
    with pytest.raises(MeshFailed, match="trainer was killed"):
        await waiting
    with pytest.raises(MeshFailed, match="trainer was killed"):
        await board.unless_lost("trainer", ask())
    assert asked == [1]


async def test_a_fault_that_ends_nothing_ends_nothing() -> None:
    board = FaultBoard()
    board.report(MeshFailed("generator0 was killed", "generator0"), ends=False)

    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await board.watch(work()) == 7
    assert board.settle() is None


async def test_a_second_request_to_stop_asks_to_hurry() -> None:
    announced: list[Exception] = []
    board = FaultBoard(announced.append)
    for _ in range(3):
        board.report(Stopped(2))
    with pytest.raises(Stopped):
        await board.watch(forever())
    await board.hurry.wait()
    assert len(announced) == 1
