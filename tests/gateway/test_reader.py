"""Works are done in turn by one thread, and each comes back to who asked for it."""

import asyncio
import threading
import time

import pytest

from titan_rl.gateway.render_thread import RETURN_SECONDS, Reader


@pytest.mark.asyncio
async def test_works_are_done_in_turn_by_one_thread_that_is_not_the_loops():
    reader, order, threads = Reader(), [], set()

    def work(number):
        order.append(number)
        threads.add(threading.get_ident())
        return -number

    assert await asyncio.gather(*(reader.do(lambda n=n: work(n)) for n in range(20))) == [-n for n in range(20)]
    assert await reader.do(lambda: work(20)) == -20
    assert order == list(range(21))
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.asyncio
async def test_a_work_that_fails_fails_its_own_caller_only():
    reader = Reader()
    failed, done = await asyncio.gather(reader.do(lambda: 1 // 0), reader.do(lambda: 2), return_exceptions=True)
    assert isinstance(failed, ZeroDivisionError) and done == 2


@pytest.mark.asyncio
async def test_what_was_asked_for_by_a_caller_that_left_is_not_done():
    reader, go_on, order = Reader(), threading.Event(), []
    first = asyncio.create_task(reader.do(lambda: go_on.wait() and order.append("first")))
    await asyncio.sleep(0)
    left = asyncio.create_task(reader.do(lambda: order.append("left")))
    last = asyncio.create_task(reader.do(lambda: order.append("last")))
    await asyncio.sleep(0)
    left.cancel()
    go_on.set()
    await asyncio.gather(first, last)
    assert left.cancelled() and order == ["first", "last"]


@pytest.mark.asyncio
async def test_what_is_done_does_not_wait_for_a_long_work_behind_it():
    reader, go_on = Reader(), threading.Event()

    def short():
        end = time.monotonic() + 2 * RETURN_SECONDS
        while time.monotonic() < end:
            pass

    before = [asyncio.create_task(reader.do(short)) for _ in range(3)]
    long = asyncio.create_task(reader.do(go_on.wait))
    await asyncio.gather(*before)
    assert not long.done()
    go_on.set()
    assert await long
