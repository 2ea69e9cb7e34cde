"""User code that fails in every way costs its own call and nothing else (12 s: processes start and time limits end)."""

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.processes import ends, halt
from support.rollouts import UNRULY

from titan_rl.environments.rubric import Transcript
from titan_rl.errors import ActorGone, ConfigError, TaskError, TaskTimeout
from titan_rl.isolation import fork_server_client, pool
from titan_rl.isolation.pool import MAX_PROCESSES, UserCodePool
from titan_rl.isolation.wire import CallKind, EnvironmentSetup, ExamplePrompt, UserCall
from titan_rl.types import FinishReason, Message, Purpose


@asynccontextmanager
async def environment(cls="Unruly", *, step_seconds=20.0, start_seconds=60.0, held_out=0, prompts=0, **kwargs):
    process = UserCodePool(
        EnvironmentSetup(
            name=f"{UNRULY}:{cls}",
            kwargs=kwargs,
            run_seed=5,
            imports=(UNRULY,),
            step_seconds=step_seconds,
            grade_seconds=step_seconds,
            start_seconds=start_seconds,
            held_out=held_out,
            prompts=prompts,
        )
    )
    try:
        process.info = await process.start()
        process.host = process.pid
        yield process
    finally:
        pid = process.pid
        await process.close()
        assert pid is None or not Path(f"/proc/{pid}").exists()  # neither running nor a zombie


async def test_a_defect_of_the_pool_itself_fails_its_calls(monkeypatch):
    async with environment() as process:
        monkeypatch.setattr(process, "_fork", lambda: 1 / 0)
        with pytest.raises(TaskError, match="could not be run: division by zero"):
            async with asyncio.timeout(60):
                await process.call(UserCall(CallKind.EXAMPLE, Purpose.TRAIN, 0))


def score(index, purpose=Purpose.TRAIN) -> UserCall:
    messages = (Message("user", f"{index}="), Message("assistant", "1"))
    return UserCall(CallKind.SCORE, purpose, index, Transcript(messages, (FinishReason.STOP,)))


async def outcomes(process, indices):
    """reward or error text, by index."""
    calls = [process.call(score(index)) for index in indices]
    results = await asyncio.gather(*calls, return_exceptions=True)
    return {
        index: str(result) if isinstance(result, TaskError) else result[0]
        for index, result in zip(indices, results, strict=True)
    }


async def test_a_process_takes_a_quarter_of_the_waiting_calls_and_the_others_share_the_rest(heard):
    """The first calls of the lists hang: each holds up those behind it in its list, and no list is everything."""
    firsts = [0, 16, 28, 37]  # 64 calls: lists of 16, 12, 9 and 7
    async with environment(behaviour={str(index): "hang" for index in firsts}, step_seconds=600.0) as process:
        calls = [asyncio.ensure_future(process.call(score(index))) for index in range(64)]
        await heard.times("hanging", MAX_PROCESSES)
        assert not any(call.done() for call in calls) and process.restarts == 0
        for call in calls:
            call.cancel()


async def test_slow_calls_run_side_by_side():
    """Each of them waits until all have begun. That calls of another kind are quick changes nothing."""
    async with environment("Meeting", parties=MAX_PROCESSES, step_seconds=60.0) as process:
        for _ in range(3):
            examples = (process.call(UserCall(CallKind.EXAMPLE, Purpose.TRAIN, index)) for index in range(64))
            await asyncio.gather(*examples)
        assert set((await outcomes(process, range(MAX_PROCESSES))).values()) == {1.0}
        assert process.restarts == 0


async def test_an_environment_is_made_once_whatever_happens_to_its_processes(tmp_path):
    behaviour = {"0": "crash", "1": "crash", "2": "hang"}
    async with environment("Counted", behaviour=behaviour, step_seconds=1.0, path=str(tmp_path / "made")) as process:
        await outcomes(process, range(8))
        assert process.restarts == 3
    assert (tmp_path / "made").read_text().split() == [str(process.host)]


@pytest.mark.parametrize(
    ("how", "reason", "restarts"),
    [
        ("raise", r"ValueError: boom \(.*unruly\.py:\d+ in misbehave\)", 0),
        ("exit", r"exit\(3\) was called", 0),
        ("crash", r"exited with code 7", 1),
        ("fork", r"exited with code 7", 1),
        ("example raise", r"ValueError: boom", 0),
    ],
)
async def test_one_call_that_fails_costs_only_itself(how, reason, restarts):
    async with environment(behaviour={"3": how}) as process:
        result = await outcomes(process, range(8))
        assert re.search(f"score of train prompt 3: .*{reason}", result.pop(3))
        assert result == dict.fromkeys([0, 1, 2, 4, 5, 6, 7], 1.0)
        assert process.restarts == restarts
        assert await outcomes(process, [9]) == {9: 1.0}


async def test_a_call_that_never_returns_is_killed_and_the_rest_runs_in_a_new_process():
    async with environment(behaviour={"3": "hang", "6": "hang"}, step_seconds=0.5) as process:
        result = await outcomes(process, range(8))
        assert (
            "score of train prompt 3: did not finish within 0.5 s (environment.grade_seconds) and was killed"
            in result.pop(3)
        )
        assert "prompt 6: did not finish" in result.pop(6)
        assert result == dict.fromkeys([0, 1, 2, 4, 5, 7], 1.0)
        assert process.restarts == 2


async def test_a_call_that_cannot_be_sent_costs_only_itself():
    async with environment() as process:
        unsendable = score(3)._replace(conversation=Transcript(state=lambda: "does not pickle"))
        calls = [process.call(call) for call in (score(0), unsendable, score(1))]
        first, failure, last = await asyncio.gather(*calls, return_exceptions=True)
        assert first[0] == last[0] == 1.0
        assert re.search("score of train prompt 3: cannot be sent to its process: .*pickle", str(failure))


async def ended(process, count):
    """Returns once so many processes are known to have ended."""
    async with asyncio.timeout(20):
        while process.restarts < count:
            await asyncio.sleep(0)


async def test_idle_processes_killed_from_outside_cost_nothing():
    async with environment(behaviour={"0": "who"}) as process:
        grader = (await outcomes(process, [0]))[0]
        os.kill(int(grader), signal.SIGKILL)
        await ended(process, 1)
        assert await outcomes(process, [1]) == {1: 1.0}
        host = process.pid
        os.kill(host, signal.SIGKILL)
        await ended(process, 2)
        assert await outcomes(process, [1]) == {1: 1.0}
        assert process.pid != host


async def test_a_fork_server_that_dies_is_no_fault_of_the_calls_that_ran_and_costs_none_that_waited(heard):
    async with environment(behaviour={"0": "hang"}) as process:
        first, *behind = (asyncio.ensure_future(process.call(score(index))) for index in range(64))
        await heard.numbers("hanging")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ActorGone, match="score of train prompt 0: .* was killed by signal 9"):
            await first
        others = await asyncio.gather(*behind, return_exceptions=True)
        lost = [each for each in others if isinstance(each, ActorGone)]
        assert len(lost) < MAX_PROCESSES and {each[0] for each in others if each not in lost} == {1.0}


async def test_a_fork_server_that_does_not_answer_is_replaced(heard, monkeypatch):
    monkeypatch.setattr(fork_server_client, "KILL_SECONDS", 0.2)
    async with environment(behaviour={"0": "hang"}, step_seconds=2.0) as process:
        waiting = asyncio.ensure_future(process.call(score(0)))
        await heard.numbers("hanging")
        host = process.pid
        halt(host)
        with pytest.raises(TaskTimeout, match="did not finish within 2 s"):
            await waiting
        assert await outcomes(process, [1]) == {1: 1.0}
        assert process.pid != host


async def test_a_fork_server_that_closes_its_socket_and_goes_on_is_replaced(heard, monkeypatch):
    monkeypatch.setattr(fork_server_client, "STOP_SECONDS", 0.2)
    async with environment(behaviour={"0": "hang"}) as process:
        waiting = asyncio.ensure_future(process.call(score(0)))
        await heard.numbers("hanging")
        host = process.pid
        halt(host)
        process._server._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ActorGone, match="score of train prompt 0"):
            await waiting
        assert await outcomes(process, [1]) == {1: 1.0}
        assert process.pid != host


async def test_a_fork_server_that_cannot_be_started_again_is_tried_again_for_the_next_call(monkeypatch):
    async with environment() as process:
        os.kill(process.pid, signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            with pytest.raises((TaskError, ActorGone), match=r"while starting|forked from was killed"):
                while True:  # until its end is known
                    await process.call(score(0))
        assert await outcomes(process, [1]) == {1: 1.0}


def refuse(*args, **kwargs):
    raise OSError("no more processes")


async def test_a_process_that_closes_its_socket_and_goes_on_is_replaced():
    async with environment("UnrulyAsync", behaviour={"0": "cut off"}) as process:
        assert await outcomes(process, [0]) == {0: 1.0}
        await ended(process, 1)
        assert await outcomes(process, [1]) == {1: 1.0}


@pytest.mark.parametrize("cls", ["Unruly", "Careless"])
async def test_what_user_code_started_dies_with_its_process(caplog, cls):
    caplog.set_level(logging.INFO)
    async with environment(cls, behaviour={"0": "orphan"}) as process:
        assert "exited with code 7" in (await outcomes(process, [0]))[0]
    orphans = re.findall(r"orphan (\d+)", caplog.text)
    assert len(orphans) == 1 and ends(int(orphans[0]))


async def test_what_user_code_prints_is_logged_and_harms_nothing(caplog):
    caplog.set_level(logging.INFO)
    async with environment(behaviour={"0": "print"}) as process:
        assert await outcomes(process, [0, 1]) == {0: 1.0, 1: 1.0}
    assert "a line on stdout" in caplog.text and "a line on stderr" in caplog.text


async def test_a_failing_grader_leaves_one_traceback_in_the_log(caplog):
    caplog.set_level(logging.INFO)
    async with environment(behaviour={str(index): "raise" for index in range(20)}) as process:
        assert all("boom" in error for error in (await outcomes(process, range(20))).values())
    assert caplog.text.count("Traceback (most recent call last)") == 1


async def test_async_graders_run_together_and_each_has_the_time_limit():
    behaviour = {"1": "await for ever", "2": "raise", "3": "exit"}
    async with environment("UnrulyAsync", behaviour=behaviour, step_seconds=1.0) as process:
        result = await outcomes(process, range(100))
        assert "prompt 1: did not finish within 1 s" in result.pop(1)
        assert "ValueError: boom" in result.pop(2)
        assert "exit(3) was called" in result.pop(3)
        assert set(result.values()) == {1.0}
        assert process.restarts == 0


async def test_an_async_grader_that_blocks_costs_all_that_run_beside_it_and_no_later_call(monkeypatch):
    monkeypatch.setattr(pool, "SLACK_SECONDS", 0.5)
    async with environment("UnrulyAsync", behaviour={"5": "hang"}, step_seconds=0.5) as process:
        result = await outcomes(process, range(8))
        assert "prompt 5: did not finish within 0.5 s (environment.grade_seconds) and was killed" in result[5]
        assert await outcomes(process, [8, 9]) == {8: 1.0, 9: 1.0}


async def test_an_async_grader_that_ignores_its_cancellation_costs_only_itself():
    async with environment("UnrulyAsync", behaviour={"5": "ignore cancellation"}, step_seconds=0.3) as process:
        result = await outcomes(process, range(8))
        assert "did not finish within 0.3 s (environment.grade_seconds), nor when cancelled" in result.pop(5)
        assert set(result.values()) == {1.0}
        assert await outcomes(process, [9]) == {9: 1.0}


@pytest.mark.parametrize(
    ("cls", "options", "error", "why"),
    [
        ("NotPossible", {}, TaskError, "no data set here"),
        ("NeverReady", {"start_seconds": 0.5}, TaskError, "was not ready within 0.5 s"),
        ("Count", {"turns": 1}, ConfigError, "is no subclass of titan_rl.environments.base.Environment"),
    ],
)
async def test_an_environment_that_cannot_be_made_says_why(cls, options, error, why):
    with pytest.raises(error, match=why):
        async with environment(cls, **options):
            pass


async def test_it_says_what_the_environment_is():
    async with environment(size=7, held_out=100) as process:
        assert process.info == (7, 3, False, (), False, False, False, frozenset())
        asked = await process.call(UserCall(CallKind.EXAMPLE, Purpose.TRAIN, 7 + 2))
        assert asked == ExamplePrompt((Message("user", "2="),))  # the stream starts over; the answer stays where it is
        assert await process.call(score(2, Purpose.EVALUATE))
        with pytest.raises(TaskError, match="no held-out prompt 3"):
            await process.call(score(3, Purpose.EVALUATE))
    async with environment("Countdown", size=7, prompts=4) as process:
        assert process.info == (4, 0, True, (), False, False, False, frozenset())


async def test_closing_fails_the_calls_that_wait(heard):
    async with environment(behaviour={"0": "hang"}) as process:
        waiting = asyncio.ensure_future(process.call(score(0)))
        await heard.numbers("hanging")
        await process.close()
        with pytest.raises(TaskError, match="closed"):
            await waiting
        with pytest.raises(TaskError, match="closed"):
            await process.call(score(1))


async def test_a_caller_that_left_is_not_waited_for():
    async with environment() as process:
        gone = asyncio.ensure_future(process.call(score(0)))
        await asyncio.sleep(0)
        gone.cancel()
        assert await outcomes(process, [1]) == {1: 1.0}
