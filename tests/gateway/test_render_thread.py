"""Jobs run in turn in one thread, and each result comes back to who asked for it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from titan_rl.gateway.sampling import in_turn


class PanicError(BaseException):
    """What a tokenizer that is written in Rust raises for a bug of its own."""


@pytest.mark.asyncio
async def test_works_are_done_in_turn_by_one_thread_that_is_not_the_loops():
    thread, order, threads = ThreadPoolExecutor(1), [], set()

    def work(number):
        order.append(number)
        threads.add(threading.get_ident())
        return -number

    assert await asyncio.gather(*(in_turn(thread, lambda n=n: work(n)) for n in range(20))) == [-n for n in range(20)]
    assert await in_turn(thread, lambda: work(20)) == -20
    assert order == list(range(21))
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.asyncio
async def test_a_work_that_fails_fails_its_own_caller_only():
    thread = ThreadPoolExecutor(1)

    def panic():
        raise PanicError("the tokenizer")

    failed, panicked, done = await asyncio.gather(
        in_turn(thread, lambda: 1 // 0), in_turn(thread, panic), in_turn(thread, lambda: 2), return_exceptions=True
    )
    assert isinstance(failed, ZeroDivisionError) and done == 2
    assert isinstance(panicked, RuntimeError) and str(panicked) == "PanicError: the tokenizer"


@pytest.mark.asyncio
async def test_what_was_asked_for_by_a_caller_that_left_is_not_done():
    thread, go_on, order = ThreadPoolExecutor(1), threading.Event(), []
    first = asyncio.create_task(in_turn(thread, lambda: go_on.wait() and order.append("first")))
    await asyncio.sleep(0)
    left = asyncio.create_task(in_turn(thread, lambda: order.append("left")))
    last = asyncio.create_task(in_turn(thread, lambda: order.append("last")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})  # the thread is free only after that
    go_on.set()
    await asyncio.gather(first, last)
    assert left.cancelled() and order == ["first", "last"]
