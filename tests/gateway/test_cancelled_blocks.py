"""A block of a call ends with the reason for its end, once, and nothing else is cancelled."""

import asyncio

import pytest

from titan_rl.errors import GatewayClosing
from titan_rl.gateway.callers import cancelled_by

pytestmark = pytest.mark.asyncio
REASON = GatewayClosing("it closes")


def ends() -> asyncio.Future[GatewayClosing]:
    return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("before", [False, True])
async def test_what_a_block_waits_for_is_cancelled_and_the_reason_is_raised(before: bool) -> None:
    end, cleaned = ends(), []
    end.set_result(REASON) if before else asyncio.get_running_loop().call_soon(end.set_result, REASON)
    with pytest.raises(GatewayClosing):
        async with cancelled_by(end):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned.append(True)
    await asyncio.sleep(0)
    assert cleaned == [True]


async def test_a_block_that_is_left_in_the_turn_of_the_end_is_not_cancelled() -> None:
    end, told = ends(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with cancelled_by(end):
        end.set_result(REASON)
    await asyncio.sleep(0.01)
    assert told == []


async def test_a_block_that_is_cancelled_by_another_says_nothing_of_the_end() -> None:
    end, begun = ends(), asyncio.Event()

    async def work() -> None:
        async with cancelled_by(end):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_time_out_of_the_blocks_own_comes_through() -> None:
    with pytest.raises(TimeoutError):
        async with cancelled_by(ends()):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
