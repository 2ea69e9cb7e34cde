"""Rollouts that programs play, in sessions whose record a test wrote down (15 s: processes start)."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from support.processes import ends
from support.rollouts import TASKS, completion, request
from support.rollouts import runner as any_runner

from titan_rl.errors import ActorFailed, ActorGone, ConfigError, GeneratorFailed
from titan_rl.isolation.wire import CallKind, UserCall
from titan_rl.rollout.config import AgentsConfig
from titan_rl.rollout.rollouter import OpenRollout
from titan_rl.rollout.samples import Turn
from titan_rl.rollout.trajectory import Prompt, RolloutRequest, Trajectory
from titan_rl.types import Endpoint, FailureKind, FinishReason, Message, Purpose, StopReason

ASKED, ANSWERED, ADDED, ENDED = [3, 12], [4, 1], [5, 12], [6, 1]
CONVERSATION = [Message("user", "1="), Message("assistant", "2"), Message("user", "3="), Message("assistant", "4")]


def call(prompt, sampled, **known) -> Turn:
    return Turn(
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        completion=completion("of a program", sampled),
        message=Message("assistant", ""),
        finish_reason=FinishReason.STOP,
        **known,
    )


def record(*turns, failure="", misread="") -> Callable[[RolloutRequest], Trajectory]:
    """What every session of a scripted gateway has when it is closed."""

    def closed(a_request: RolloutRequest) -> Trajectory:
        trajectory = Trajectory(a_request, None, run_seed=0, max_model_len=0)
        trajectory.turns = [*turns]
        trajectory.failure, trajectory.misread = failure, misread
        trajectory.close().messages = [*CONVERSATION] if turns else []
        return trajectory

    return closed


TWO_TURNS = record(call(ASKED, ANSWERED), call(ASKED + ANSWERED + ADDED, ENDED))


class ScriptedSessions:
    """A gateway at which every session has the same record; what fails is what a test says."""

    def __init__(self, played=TWO_TURNS, *, refuses=None, breaks=None):
        self.played, self.refuses, self.breaks = played, refuses, breaks
        self.requests = []
        self.closed = []
        self.most_open = 0
        self.idled = asyncio.Event()
        self.idle_seconds = set()
        self.closing = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_close.set()

    async def open(self, request):
        if self.refuses:
            raise self.refuses
        self.requests.append(request)
        self.most_open = max(self.most_open, len(self.requests) - len(self.closed))
        return Endpoint(base_url="http://127.0.0.1:9/v1", api_key=request.session_id, model="policy")

    async def idle(self, session_id, seconds):
        self.idle_seconds.add(seconds)
        if self.breaks:
            raise self.breaks
        await self.idled.wait()

    async def close(self, session_id):
        self.closing.set()
        await self.may_close.wait()
        self.closed.append(session_id)
        return self.played(next(each for each in self.requests if each.session_id == session_id))

    def all_closed_once(self) -> bool:
        return sorted(self.closed) == sorted(each.session_id for each in self.requests)


@asynccontextmanager
async def runner(model_path, sessions, *, cls="Programs", behaviour=None, **options):
    name, kwargs = f"{TASKS / 'programs.py'}:{cls}", {"behaviour": behaviour or {}}
    async with any_runner(model_path, name, kwargs=kwargs, sessions=sessions, **options) as group_runner:
        yield group_runner
    assert sessions.all_closed_once()


async def nobody_is_asked(a_request):
    raise AssertionError("a program's turns come through the gateway")


async def play(group_runner, group_id=0, *, samples=2, **kwargs):
    return await group_runner.run_group(request(group_id, samples=samples, **kwargs), nobody_is_asked)


async def test_what_a_program_asked_is_trained_and_its_state_is_graded(model_path):
    sessions = ScriptedSessions()
    async with runner(model_path, sessions, max_turns=5, max_sampled_tokens=9) as group_runner:
        result = await play(group_runner, 7)
    assert [(each.error, each.reward) for each in result.rollouts] == [("", 1.0)] * 2
    assert [each.messages for each in result.trajectories] == [CONVERSATION] * 2
    assert [sample.token_ids.tolist() for sample in result.samples] == [ASKED + ANSWERED + ADDED + ENDED] * 2
    assert result.samples[0].loss_mask.tolist() == [False, False, True, True] * 2
    assert {(each.max_turns, each.max_sampled_tokens, each.sample) for each in sessions.requests} == {
        (5, 9, 0),
        (5, 9, 1),
    }
    assert all(each.group.group_id == 7 for each in sessions.requests)
    assert len({each.session_id for each in sessions.requests}) == 2
    assert all(20 < seconds < 40 for seconds in sessions.idle_seconds), "the wait for its process is not its own"


async def test_the_order_in_which_open_calls_are_answered_changes_nothing_that_is_trained(model_path):
    first, second = call([2, 3], ANSWERED), call([2, 4], ENDED, seed=1)
    later = call([2, 3, *ANSWERED, 5], ENDED)
    trained = []
    for turns in ((first, second, later), (second, first, later), (first, later, second)):
        async with runner(model_path, ScriptedSessions(record(*turns))) as group_runner:
            result = await play(group_runner, samples=1)
        trained.append([each.token_ids.tolist() for each in result.samples])
    assert trained == trained[:1] * 3


async def test_a_program_that_asks_nothing_is_graded_over_its_prompt_and_trains_nothing(model_path):
    async with runner(model_path, ScriptedSessions(record())) as group_runner:
        result = await play(group_runner, 3)
    assert [each.error for each in result.rollouts] == ["", ""]
    assert [each.messages for each in result.trajectories] == [[Message("user", "3=")]] * 2
    assert result.samples == ()


async def test_a_worker_runs_no_more_programs_at_once_than_it_may(model_path):
    sessions = ScriptedSessions()
    async with runner(model_path, sessions, agents=AgentsConfig(at_once=3)) as group_runner:
        results = await asyncio.gather(*(play(group_runner, index, samples=4) for index in range(3)))
    assert sessions.most_open == 3
    assert [rollout.error for result in results for rollout in result.rollouts] == [""] * 12


@pytest.mark.parametrize(
    ("how", "reason", "failure"),
    [
        ("raise", "play of train prompt 0: ValueError: boom", FailureKind.TASK),
        (
            "crash",
            "play of train prompt 0: its process exited with code 3 and returned nothing",
            FailureKind.INFRASTRUCTURE,
        ),
        ("unpicklable", "does not pickle", FailureKind.TASK),
    ],
)
async def test_a_program_that_fails_costs_its_rollout_whose_turns_are_kept(model_path, how, reason, failure):
    sessions = ScriptedSessions()
    async with runner(model_path, sessions, behaviour={"0": how}) as group_runner:
        result, other = await asyncio.gather(play(group_runner, 0), play(group_runner, 1))
    for rollout, trajectory in zip(result.rollouts, result.trajectories, strict=True):
        assert reason in rollout.error and rollout.failure is failure
        assert len(trajectory.turns) == 2 and trajectory.messages == CONVERSATION
    assert result.samples == () and [rollout.error for rollout in other.rollouts] == ["", ""]


async def test_a_state_that_the_rubric_cannot_use_costs_the_rollout(model_path):
    async with runner(model_path, ScriptedSessions(), behaviour={"0": "nothing"}) as group_runner:
        result = await play(group_runner)
    assert all("'NoneType' object has no attribute 'text'" in rollout.error for rollout in result.rollouts)


async def test_a_program_that_neither_asks_nor_returns_is_ended(model_path, heard):
    sessions = ScriptedSessions()
    async with runner(model_path, sessions, behaviour={"0": "burn"}, step_seconds=17.0) as group_runner:
        playing = asyncio.ensure_future(play(group_runner, samples=1))
        (pid,) = await heard.numbers("burning")
        sessions.idled.set()
        (rollout,) = (await playing).rollouts
        assert (
            "its program neither asked nor returned for 17 s (environment.program_seconds) and was ended"
            in rollout.error
        )
        assert rollout.turn_count == 2
        assert rollout.stop_reason is StopReason.TIMEOUT
        assert await asyncio.to_thread(ends, pid)


@pytest.fixture
def rollout_limits(monkeypatch):
    """Limits of rollouts that have 4321 s; they end when a test says so."""
    limits, timeout = [], asyncio.timeout

    def caught(seconds):
        limit = timeout(seconds)
        if seconds == 4321.0:
            limits.append(limit)
        return limit

    monkeypatch.setattr(asyncio, "timeout", caught)
    return limits


async def test_a_program_past_the_rollouts_limit_is_ended_and_its_turns_are_kept(model_path, heard, rollout_limits):
    sessions = ScriptedSessions()
    async with runner(model_path, sessions, behaviour={"0": "burn"}, seconds=4321.0) as group_runner:
        playing = asyncio.ensure_future(play(group_runner, samples=1))
        (pid,) = await heard.numbers("burning")
        rollout_limits[0].reschedule(asyncio.get_running_loop().time())
        result = await playing
        assert result.rollouts[0].error == "was not over within rollout.seconds (4321 s)"
        assert len(result.trajectories[0].turns) == 2 and result.trajectories[0].messages == CONVERSATION
        assert await asyncio.to_thread(ends, pid)


async def test_a_rollout_that_waits_for_its_turn_loses_no_time(model_path, heard, rollout_limits):
    one = {"agents": AgentsConfig(at_once=1), "seconds": 4321.0}
    async with runner(model_path, ScriptedSessions(), behaviour={"0": "burn"}, **one) as group_runner:
        first = asyncio.ensure_future(play(group_runner, 0, samples=1))
        await heard.numbers("burning")
        second = asyncio.ensure_future(play(group_runner, 1, samples=1))
        await group_runner.pool.call(UserCall(CallKind.EXAMPLE, Purpose.TRAIN, 2))  # made after the second's prompt
        assert len(rollout_limits) == 1
        rollout_limits[0].reschedule(asyncio.get_running_loop().time())
        errors = [(await each).rollouts[0].error for each in (first, second)]
        assert errors == ["was not over within rollout.seconds (4321 s)", ""] and len(rollout_limits) == 2


async def test_a_cancelled_group_waits_for_its_sessions_to_be_closed(model_path):
    sessions = ScriptedSessions()
    sessions.may_close.clear()
    async with runner(model_path, sessions) as group_runner:
        playing = asyncio.ensure_future(play(group_runner, samples=1))
        await sessions.closing.wait()
        for _ in range(2):
            playing.cancel()
            await asyncio.sleep(0)
        sessions.may_close.set()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert sessions.all_closed_once() and len(sessions.closed) == 1


async def test_a_session_is_closed_also_when_nobody_waits_for_it_any_more(model_path):
    sessions = ScriptedSessions()
    sessions.may_close.clear()
    async with runner(model_path, sessions) as group_runner:
        prompt = Prompt(token_ids=np.zeros(0, np.int32))
        begun = Trajectory(
            RolloutRequest(session_id="s", group=request(), sample=0, max_turns=1, max_sampled_tokens=0),
            group_runner.renderer,
            run_seed=0,
            max_model_len=0,
        )
        pool, programs = group_runner.pool, group_runner.programs
        rollout = OpenRollout(pool, begun, prompt=prompt, programs=programs)
        playing = asyncio.ensure_future(rollout.run_program())
        await sessions.closing.wait()
        for _ in range(2):  # the second cancellation is not waited out
            playing.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert sessions.closed == []
        asyncio.get_running_loop().call_soon(sessions.may_close.set)
        await group_runner.close()
        assert sessions.closed == ["s"] and len(rollout.trajectory.turns) == 2


async def test_an_engine_that_fails_a_call_fails_the_group(model_path):
    sessions = ScriptedSessions(record(call(ASKED, ANSWERED), failure="generator0 is gone"))
    async with runner(model_path, sessions, behaviour={"0": "raise"}) as group_runner:
        with pytest.raises(GeneratorFailed, match="train group 0 sample .: generator0 is gone"):
            await play(group_runner)


@pytest.mark.parametrize("how", ["raise", "note"])
async def test_an_answer_that_the_gateway_cannot_read_costs_its_rollout_and_is_not_blamed_on_the_program(
    model_path, how
):
    sessions = ScriptedSessions(record(call(ASKED, ANSWERED), misread="it reads otherwise"))
    async with runner(model_path, sessions, behaviour={"0": how}) as group_runner:
        result = await play(group_runner, samples=1)
    (rollout,) = result.rollouts
    assert rollout.error == "the gateway could not read an answer, a bug: it reads otherwise"
    assert rollout.failure is FailureKind.INFRASTRUCTURE
    assert result.samples == () and rollout.turn_count == 1


async def test_a_gateway_that_fails_fails_the_group(model_path):
    async with runner(model_path, ScriptedSessions(refuses=ActorFailed("no gateway"))) as group_runner:
        with pytest.raises(ActorFailed, match="no gateway"):
            await play(group_runner)
    sessions = ScriptedSessions(breaks=ActorFailed("the gateway is gone"))
    async with runner(model_path, sessions, behaviour={"0": "burn"}) as group_runner:
        with pytest.raises(ActorFailed, match="the gateway is gone"):
            await play(group_runner)


async def test_a_group_whose_programs_lose_their_host_is_lost_and_later_ones_play(model_path, heard):
    async with runner(model_path, ScriptedSessions(), behaviour={"0": "burn"}) as group_runner:
        playing = asyncio.ensure_future(play(group_runner, samples=1))
        await heard.numbers("burning")
        os.kill(group_runner.pool.pid, signal.SIGKILL)
        with pytest.raises(ActorGone, match=r"the process that it was forked from was killed by signal 9"):
            await playing
        assert [each.error for each in (await play(group_runner, 1)).rollouts] == ["", ""]


async def test_programs_without_a_gateway_are_refused_at_the_start(model_path):
    with pytest.raises(ConfigError, match=r"programs.py:Programs plays .*, which need a gateway"):
        async with runner(model_path, None):
            pass
