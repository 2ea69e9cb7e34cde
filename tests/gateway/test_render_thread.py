"""Jobs run in turn in one thread, and each result comes back to who asked for it."""

import asyncio
import threading

import pytest

from titan_rl.gateway.sampling import RenderThread


class PanicError(BaseException):
    """What a tokenizer that is written in Rust raises for a bug of its own."""


@pytest.mark.asyncio
async def test_works_are_done_in_turn_by_one_thread_that_is_not_the_loops():
    thread, order, threads = RenderThread(), [], set()

    def work(number):
        order.append(number)
        threads.add(threading.get_ident())
        return -number

    assert await asyncio.gather(*(thread.run(lambda n=n: work(n)) for n in range(20))) == [-n for n in range(20)]
    assert await thread.run(lambda: work(20)) == -20
    assert order == list(range(21))
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.asyncio
async def test_a_work_that_fails_fails_its_own_caller_only():
    thread = RenderThread()

    def panic():
        raise PanicError("the tokenizer")

    failed, panicked, done = await asyncio.gather(
        thread.run(lambda: 1 // 0), thread.run(panic), thread.run(lambda: 2), return_exceptions=True
    )
    assert isinstance(failed, ZeroDivisionError) and done == 2
    assert isinstance(panicked, RuntimeError) and str(panicked) == "PanicError: the tokenizer"


@pytest.mark.asyncio
async def test_what_was_asked_for_by_a_caller_that_left_is_not_done():
    thread, go_on, order = RenderThread(), threading.Event(), []
    first = asyncio.create_task(thread.run(lambda: go_on.wait() and order.append("first")))
    await asyncio.sleep(0)
    left = asyncio.create_task(thread.run(lambda: order.append("left")))
    last = asyncio.create_task(thread.run(lambda: order.append("last")))
    await asyncio.sleep(0)
    left.cancel()
    go_on.set()
    await asyncio.gather(first, last)
    assert left.cancelled() and order == ["first", "last"]
