"""Jobs are done one at a time, and each result comes back to who asked for it."""

import asyncio
import threading

import pytest

from titan_rl.gateway.sampling import RenderJobs


class PanicError(BaseException):
    """What a tokenizer that is written in Rust raises for a bug of its own."""


@pytest.mark.asyncio
async def test_works_are_done_in_turn_by_one_thread_that_is_not_the_loops():
    jobs, order, threads = RenderJobs(), [], set()

    def work(number):
        order.append(number)
        threads.add(threading.get_ident())
        return -number

    assert await asyncio.gather(*(jobs.run(lambda n=n: work(n)) for n in range(20))) == [-n for n in range(20)]
    assert await jobs.run(lambda: work(20)) == -20
    assert order == list(range(21))
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.asyncio
async def test_a_quick_work_waits_for_no_thread_unless_that_works():
    jobs, begun, go_on = RenderJobs(), threading.Event(), threading.Event()
    assert await jobs.run(threading.get_ident, quick=True) == threading.get_ident()
    long = asyncio.create_task(jobs.run(lambda: begun.set() or go_on.wait()))
    await asyncio.to_thread(begun.wait)
    quick = asyncio.create_task(jobs.run(threading.get_ident, quick=True))
    await asyncio.sleep(0)
    assert not quick.done(), "renderers are not made for two threads"
    go_on.set()
    assert await long and await quick != threading.get_ident()


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.asyncio
async def test_a_work_that_fails_fails_its_own_caller_only(quick):
    jobs = RenderJobs()

    def panic():
        raise PanicError("the tokenizer")

    works = (lambda: 1 // 0, panic, lambda: 2)
    failed, panicked, done = await asyncio.gather(
        *(jobs.run(each, quick=quick) for each in works), return_exceptions=True
    )
    assert isinstance(failed, ZeroDivisionError) and done == 2
    assert isinstance(panicked, RuntimeError) and str(panicked) == "PanicError: the tokenizer"


@pytest.mark.asyncio
async def test_what_was_asked_for_by_a_caller_that_left_is_not_done():
    jobs, go_on, order = RenderJobs(), threading.Event(), []
    first = asyncio.create_task(jobs.run(lambda: go_on.wait() and order.append("first")))
    await asyncio.sleep(0)
    left = asyncio.create_task(jobs.run(lambda: order.append("left")))
    last = asyncio.create_task(jobs.run(lambda: order.append("last")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})  # the thread is free only after that
    go_on.set()
    await asyncio.gather(first, last)
    assert left.cancelled() and order == ["first", "last"]
