"""Which calls are answered, fail or go to another process, whatever processes do: driven step by step (2 s)."""

import asyncio
import pickle
from contextlib import asynccontextmanager
from math import inf
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.errors import TaskError, TaskTimeout
from titan_rl.isolation import pool
from titan_rl.isolation.wire import CallKind, CallResult, EnvironmentSetup, Frames, TaskInfo, UserCall
from titan_rl.types import Purpose

SCORE = msgspec.Raw(msgspec.msgpack.encode((1.0, {})))
TOGETHER = CallKind.SCORE_GROUP
"""The kind that runs `async def` functions here. Its calls have no rollouts, so no scores."""


class PlayedProcess:
    lost_server = False

    def __init__(self):
        self.calls, self.ended = [], asyncio.get_running_loop().create_future()

    @property
    def alive(self):
        return not self.ended.done()

    def send(self, frame):
        self.calls += Frames(pickle.loads).feed(frame)

    def kill(self):
        if self.alive:
            self.ended.set_result("was killed")

    def answer(self, place, *, last=False):
        number, call = self.calls.pop(place)
        value = SCORE if call.kind is CallKind.SCORE else msgspec.Raw(msgspec.msgpack.encode(()))
        self.on_results([CallResult(number, value, last=last)])


class PlayedServer:
    gone, pid = False, None
    room = 1000
    """More processes at a time cannot be forked."""

    def __init__(self, setup):
        self.processes = []
        hosts.append(self)

    async def start(self):
        return TaskInfo(None, 0, False, asynchronous=frozenset({TOGETHER}))

    async def fork(self):
        self.processes.append(PlayedProcess())
        if len([each for each in self.processes if each.alive]) > self.room:
            self.processes[-1].ended.set_result("could not be forked")
            raise TaskError("its process could not be forked")
        return self.processes[-1]

    async def stop(self):
        pass


hosts: list[PlayedServer] = []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_call_fails_only_if_its_process_may_have_ended_by_it_and_every_call_has_one_end(data):
    async def main():
        calls = pool.UserCodePool(EnvironmentSetup(name="played", kwargs={}, run_seed=0, grade_seconds=1e6))
        await calls.start()
        kinds = data.draw(st.lists(st.sampled_from([CallKind.SCORE, TOGETHER]), min_size=1, max_size=20))
        asked = [
            asyncio.ensure_future(calls.call(UserCall(kind, Purpose.TRAIN, index))) for index, kind in enumerate(kinds)
        ]
        try:
            to_blame = await play(asked)
        finally:  # hypothesis may leave an example anywhere
            await calls.close()
            results = await asyncio.gather(*asked, return_exceptions=True)
        assert {index for index, each in enumerate(results) if isinstance(each, TaskError)} == to_blame

    async def play(asked):
        """Let processes answer, end after an answer, or die until all calls are over; returns which ones were lost."""
        to_blame = set()
        while True:
            for _ in range(10):
                await asyncio.sleep(0)
            processes = [each for each in hosts[-1].processes if each.alive]
            assert len(processes) <= pool.MAX_PROCESSES + 1
            if all(each.done() for each in asked):
                return to_blame
            process = data.draw(st.sampled_from([each for each in processes if each.calls]))
            together = process.calls[0][1].kind is TOGETHER
            place = data.draw(st.integers(0, len(process.calls) - 1)) if together else 0
            event = data.draw(st.sampled_from(["answer", "answer", "last", "die"]))
            if event == "die":
                to_blame |= {call.prompt_index for _, call in process.calls[: None if together else 1]}
            else:
                process.answer(place, last=event == "last")
            if event != "answer":
                process.kill()

    # How long an answer took decides how many calls are sent at once: an example must be the same on a slow machine.
    quick = data.draw(st.sampled_from([-1.0, inf]))
    with patch.object(pool, "ForkServerClient", PlayedServer), patch.object(pool, "QUICK_SECONDS", quick):
        asyncio.run(main())


@asynccontextmanager
async def asked(count, kind=CallKind.SCORE, *more, room=1000, grade_seconds=1e6, step_seconds=1e6):
    """So many calls of which none is answered yet, then one of each of the other kinds; and the fork server."""
    with patch.object(pool, "ForkServerClient", PlayedServer), patch.object(PlayedServer, "room", room):
        seconds = {"step_seconds": step_seconds, "grade_seconds": grade_seconds}
        calls = pool.UserCodePool(EnvironmentSetup(name="played", kwargs={}, run_seed=0, **seconds))
        await calls.start()
        kinds = [kind] * count + [*more]
        waiting = [
            asyncio.ensure_future(calls.call(UserCall(kind, Purpose.TRAIN, index))) for index, kind in enumerate(kinds)
        ]
        await settled()
        yield waiting, hosts[-1]
        await calls.close()


async def settled():
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [CallKind.SCORE, TOGETHER])
async def test_where_no_process_can_be_forked_calls_fail_at_once(kind):
    async with asked(3, kind, room=0) as (calls, server):
        assert all(call.done() and "its process could not be forked" in str(call.exception()) for call in calls)
        assert len(server.processes) == 1


async def test_where_no_further_process_can_be_forked_the_others_take_the_calls(monkeypatch):
    monkeypatch.setattr(pool, "PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(pool, "QUICK_LIST", 1)  # so that calls still wait after the first answer
    async with asked(4, room=1) as (calls, server):
        process, further = server.processes
        assert process.alive and not further.alive
        process.answer(0)
        await settled()
        assert len(server.processes) == 2, "it is not tried again at once"
        server.room = 2
        async with asyncio.timeout(20):
            while len(server.processes) < 3:
                await asyncio.sleep(0.01)
            while not all(call.done() for call in calls):
                for each in server.processes:
                    if each.calls:
                        each.answer(0)
                await asyncio.sleep(0)
        assert [call.result() for call in calls] == [(1.0, {})] * 4


async def test_answers_that_nobody_asked_for_give_a_process_no_more_time():
    async with asked(1, grade_seconds=0.2) as ((call,), server), asyncio.timeout(20):
        while not call.done():
            server.processes[0].on_results([CallResult(1 << 40)])
            await asyncio.sleep(0.01)
        with pytest.raises(TaskTimeout, match=r"did not finish within 0.2 s \(environment.grade_seconds\) and was"):
            await call


async def test_a_step_is_late_by_its_own_limit_while_a_grade_may_go_on():
    async with asked(1, CallKind.SCORE, CallKind.RESPOND, step_seconds=0.2) as ((grade, step), server):
        with pytest.raises(TaskTimeout, match=r"did not finish within 0.2 s \(environment.step_seconds\) and was"):
            await asyncio.wait_for(step, 20)
        server.processes[0].answer(0)
        assert await asyncio.wait_for(grade, 20) == (1.0, {})
