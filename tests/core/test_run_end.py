"""The first fatal fault ends the work in hand; none is lost."""

import asyncio
from collections.abc import Coroutine
from threading import Thread
from typing import Any

import pytest

from titan_rl.errors import ActorFailed, GeneratorFailed, MeshFailed
from titan_rl.supervision.run_end import RunEnd


def forever() -> Coroutine[Any, Any, Any]:
    return asyncio.Event().wait()


async def test_a_fault_from_another_thread_ends_the_work() -> None:
    end = RunEnd()
    watching = asyncio.create_task(end.watch(forever()))
    Thread(target=end.report, args=(ActorFailed("the watch over processes is broken"),)).start()
    with pytest.raises(ActorFailed, match="is broken"):
        await watching


async def test_a_fault_that_came_before_is_raised_by_the_next_watch() -> None:
    end = RunEnd()
    end.report(ActorFailed("early"))
    with pytest.raises(ActorFailed, match="early"):
        await end.watch(forever())


async def test_the_works_own_error_says_more_and_wins() -> None:
    announced: list[Exception] = []
    end = RunEnd(announced.append)

    async def work() -> None:
        end.report(ActorFailed("mesh generator0 failed"))
        await asyncio.sleep(0)
        raise GeneratorFailed("generator0 rank 1: lockstep lost")

    with pytest.raises(GeneratorFailed, match="lockstep lost"):
        await end.watch(work())
    assert [type(error) for error in announced] == [ActorFailed, GeneratorFailed]


async def test_what_needs_the_trainer_goes_on_unless_the_trainer_is_given_up() -> None:
    end, mesh = RunEnd(), "trainer"
    saving = asyncio.create_task(end.unless_given_up(mesh, asyncio.sleep(0, "saved")))
    end.end(MeshFailed("router failed 6 times in a row", "router"))
    assert await saving == "saved"
    end = RunEnd()
    saving = asyncio.create_task(end.unless_given_up(mesh, forever()))
    end.end(MeshFailed("trainer failed 6 times in a row", mesh))
    with pytest.raises(MeshFailed, match="6 times"):
        await saving


async def test_a_block_ends_with_the_first_fatal_fault_and_is_not_cancelled_after_it() -> None:
    end = RunEnd()
    with pytest.raises(ActorFailed, match="the router was given up"):
        async with end.cancels():
            end.report(ActorFailed("the router was given up"))
            await forever()
    end = RunEnd()
    async with end.cancels():
        end.report(ActorFailed("too late"))
    for _ in range(3):
        await asyncio.sleep(0)
