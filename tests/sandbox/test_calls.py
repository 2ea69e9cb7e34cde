"""User code that fails in every way costs its own call and nothing else (12 s: processes start and time limits end)."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.processes import ends
from support.rollouts import UNRULY

from titan_rl.errors import TaskError, TaskTimeout
from titan_rl.sandbox import host_process
from titan_rl.sandbox.host_process import ForkedProcess
from titan_rl.sandbox.sandbox import MAX_PROCESSES, Sandbox
from titan_rl.sandbox.wire import Call, CallKind, Conversation, EnvironmentSetup, ExamplePrompt
from titan_rl.types import FinishReason, Message, Purpose


@asynccontextmanager
async def environment(
    cls="Unruly", *, step_seconds=20.0, slow_seconds=0.25, start_seconds=60.0, held_out=0, prompts=0, **kwargs
):
    process = Sandbox(
        EnvironmentSetup(
            name=f"{UNRULY}:{cls}",
            kwargs=kwargs,
            run_seed=5,
            imports=(UNRULY,),
            step_seconds=step_seconds,
            slow_seconds=slow_seconds,
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


async def test_a_defect_of_the_sandbox_itself_fails_its_calls(monkeypatch):
    async with environment() as process:
        monkeypatch.setattr(process, "_fork", lambda: 1 / 0)
        with pytest.raises(TaskError, match="its sandbox crashed: ZeroDivisionError"):
            async with asyncio.timeout(60):
                await process.call(Call(CallKind.EXAMPLE, Purpose.TRAIN, 0))


def score(index, purpose=Purpose.TRAIN) -> Call:
    messages = (Message("user", f"{index}="), Message("assistant", "1"))
    return Call(CallKind.SCORE, purpose, index, Conversation(messages, (FinishReason.STOP,)))


async def outcomes(process, indices):
    """reward or error text, by index."""
    calls = [process.call(score(index)) for index in indices]
    results = await asyncio.gather(*calls, return_exceptions=True)
    return {
        index: str(result) if isinstance(result, TaskError) else result[0]
        for index, result in zip(indices, results, strict=True)
    }


@pytest.fixture
def lists(monkeypatch):
    """How many calls travelled together, list by list."""
    lengths, send = [], ForkedProcess.send

    def sent(process, calls):
        lengths.append(len(calls))
        send(process, calls)

    monkeypatch.setattr(ForkedProcess, "send", sent)
    return lengths


async def test_calls_of_one_tick_travel_in_one_message(lists):
    async with environment(step_seconds=600.0, slow_seconds=150.0) as process:
        assert await outcomes(process, range(256)) == dict.fromkeys(range(256), 1.0)
        await outcomes(process, range(256))
    assert lists == [256, 256]


async def test_calls_made_while_others_run_gather_for_the_next_message(lists, heard):
    async with environment(step_seconds=600.0, slow_seconds=150.0, behaviour={"0": "stop"}) as process:
        first = asyncio.ensure_future(process.call(score(0)))
        (pid,) = await heard.numbers("stopped")
        late = []
        for index in range(1, 50):  # each in a tick of its own
            late.append(asyncio.ensure_future(process.call(score(index))))
            await asyncio.sleep(0)
        while not first.done():  # it may not have come to stop itself yet
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0)
        await asyncio.gather(first, *late)
    assert lists == [1, 49]


async def test_calls_that_take_long_run_side_by_side():
    """Each of them waits until all have begun."""
    async with environment("Meeting", parties=MAX_PROCESSES, step_seconds=60.0, slow_seconds=0.01) as process:
        assert set((await outcomes(process, range(20))).values()) == {1.0}
        assert process.restarts == 0


async def test_an_environment_is_made_once_whatever_happens_to_its_processes(tmp_path):
    behaviour = {"0": "crash", "1": "crash", "2": "hang"}
    async with environment("Counted", behaviour=behaviour, step_seconds=1.0, path=str(tmp_path / "made")) as process:
        await outcomes(process, range(8))
        assert process.restarts == 5
    assert (tmp_path / "made").read_text().split() == [str(process.host)]


@pytest.mark.parametrize(
    ("how", "reason", "restarts"),
    [
        ("raise", r"ValueError: boom \(.*unruly\.py:\d+ in misbehave\)", 0),
        ("exit", r"exit\(3\) was called", 0),
        ("crash", r"exited with code 7", 2),
        ("fork", r"exited with code 7", 2),
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
        assert "score of train prompt 3: did not finish within 0.5 s and was killed" in result.pop(3)
        assert "prompt 6: did not finish" in result.pop(6)
        assert result == dict.fromkeys([0, 1, 2, 4, 5, 7], 1.0)
        assert process.restarts == 2


async def test_a_call_that_cannot_be_sent_costs_only_itself():
    async with environment() as process:
        unsendable = score(3)._replace(conversation=Conversation(state=lambda: "does not pickle"))
        calls = [process.call(call) for call in (score(0), unsendable, score(1))]
        first, failure, last = await asyncio.gather(*calls, return_exceptions=True)
        assert first[0] == last[0] == 1.0
        assert re.search("score of train prompt 3: cannot be sent to its process: .*pickle", str(failure))


async def test_calls_about_other_prompts_do_not_wait_for_one_that_hangs():
    behaviour = {"0": "hang"}
    async with environment(behaviour=behaviour, step_seconds=600.0) as process:
        hung = [asyncio.ensure_future(process.call(score(0))) for _ in range(20)]
        assert await outcomes(process, range(1, 8)) == dict.fromkeys(range(1, 8), 1.0)
        assert not any(call.done() for call in hung) and process.restarts == 0


async def test_that_every_call_hangs_is_known_after_a_few():
    async with environment(behaviour={str(index): "hang" for index in range(200)}, step_seconds=1.0) as process:
        result = await outcomes(process, range(200))
        untried = [error for error in result.values() if "was not tried: no such call has ever finished" in error]
        assert len(untried) >= 200 - 3 * MAX_PROCESSES
        assert len([error for error in result.values() if "did not finish within 1 s and was killed" in error]) >= 4
        assert process.restarts <= 3 * MAX_PROCESSES
        assert await outcomes(process, [200]) == {200: 1.0}  # the next one is tried again


async def test_a_prompt_in_forty_whose_calls_hang_costs_no_other_prompt_a_rollout(heard):
    """All processes hang in calls about such prompts, and more of those wait, when calls about the others come."""
    hanging = range(0, 160, 40)
    async with environment(behaviour={str(index): "hang" for index in hanging}, step_seconds=1.0) as process:
        assert await outcomes(process, [1]) == {1: 1.0}
        hung = [asyncio.ensure_future(process.call(score(index))) for index in hanging for _ in range(3)]
        await heard.times("hanging", MAX_PROCESSES)
        result = await outcomes(process, sorted({*range(160)} - {*hanging}))
        assert [*result.values()] == [1.0] * 156
        for failure in await asyncio.gather(*hung, return_exceptions=True):
            assert "did not finish within 1 s and was killed" in str(failure)


async def test_every_call_that_ends_its_process_fails_for_itself():
    async with environment(behaviour={str(index): "crash" for index in range(0, 40, 2)}) as process:
        result = await outcomes(process, range(40))
        assert [index for index, each in result.items() if each == 1.0] == list(range(1, 40, 2))
        assert all("exited with code 7" in result[index] for index in range(0, 40, 2))
        assert process.restarts == 40


async def test_a_prompt_whose_calls_all_hang_costs_no_other_prompt():
    async with environment(behaviour={"0": "hang"}, step_seconds=1.5) as process:
        calls = [process.call(score(0)) for _ in range(12)] + [process.call(score(1)) for _ in range(12)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, TaskError) for result in results[:12])
        assert [reward for reward, _ in results[12:]] == [1.0] * 12


async def test_processes_killed_from_outside_cost_nothing():
    async with environment(behaviour={"3": "who"}) as process:
        grader = (await outcomes(process, range(4)))[3]
        os.kill(int(grader), signal.SIGKILL)
        assert await outcomes(process, range(3)) == dict.fromkeys(range(3), 1.0)
        host = process.pid
        os.kill(host, signal.SIGKILL)
        while process.pid == host:  # its forks may live on for a moment
            assert await outcomes(process, range(3)) == dict.fromkeys(range(3), 1.0)


async def test_a_host_that_does_not_answer_is_replaced(heard, monkeypatch):
    monkeypatch.setattr(host_process, "KILL_SECONDS", 0.2)
    async with environment(behaviour={"0": "hang"}, step_seconds=2.0) as process:
        waiting = asyncio.ensure_future(process.call(score(0)))
        await heard.numbers("hanging")
        host = process.pid
        os.kill(host, signal.SIGSTOP)
        with pytest.raises(TaskTimeout, match="did not finish within 2 s"):
            await waiting
        assert await outcomes(process, [1]) == {1: 1.0}
        assert process.pid != host


async def test_what_user_code_started_dies_with_its_process(caplog):
    caplog.set_level(logging.INFO)
    async with environment(behaviour={"0": "orphan"}) as process:
        assert "exited with code 7" in (await outcomes(process, [0]))[0]
    orphans = re.findall(r"orphan (\d+)", caplog.text)
    assert len(orphans) == 2  # it was tried twice
    assert all(ends(int(pid)) for pid in orphans)


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


async def test_an_async_grader_that_blocks_is_the_one_to_blame():
    async with environment("UnrulyAsync", behaviour={"5": "hang"}, step_seconds=0.5) as process:
        result = await outcomes(process, range(8))
        assert "prompt 5: did not finish within 0.5 s and was killed" in result.pop(5)
        assert set(result.values()) == {1.0}


async def test_an_async_grader_that_ignores_its_cancellation_costs_only_itself():
    async with environment("UnrulyAsync", behaviour={"5": "ignore cancellation"}, step_seconds=0.3) as process:
        result = await outcomes(process, range(8))
        assert "did not finish within 0.3 s, nor when cancelled" in result.pop(5)
        assert set(result.values()) == {1.0}
        assert await outcomes(process, [9]) == {9: 1.0}


async def test_an_environment_that_cannot_be_made_says_why():
    with pytest.raises(TaskError, match="no data set here"):
        async with environment("NotPossible"):
            pass


async def test_an_environment_that_is_never_ready_is_given_up():
    with pytest.raises(TaskError, match="was not ready within 0.5 s"):
        async with environment("NeverReady", start_seconds=0.5):
            pass


async def test_a_class_that_is_no_environment_is_refused():
    with pytest.raises(TaskError, match="not a subclass"):
        async with environment("Count", turns=1):
            pass


async def test_it_says_what_the_environment_is():
    async with environment(size=7, held_out=100) as process:
        assert process.info == (7, 3, False, (), False, False, frozenset())
        asked = await process.call(Call(CallKind.EXAMPLE, Purpose.TRAIN, 7 + 2))
        assert asked == ExamplePrompt((Message("user", "2="),))  # the stream starts over; the answer stays where it is
        assert await process.call(score(2, Purpose.EVALUATE))
        with pytest.raises(TaskError, match="no held-out prompt 3"):
            await process.call(score(3, Purpose.EVALUATE))
    async with environment("Countdown", size=7, prompts=4) as process:
        assert process.info == (4, 0, True, (), False, False, frozenset())


async def test_closing_fails_the_calls_that_wait(heard):
    async with environment(behaviour={"0": "hang"}) as process:
        waiting = asyncio.ensure_future(process.call(score(0)))
        await heard.numbers("hanging")
        await process.close()
        with pytest.raises(TaskError, match="closed"):
            await waiting
        with pytest.raises(TaskError, match="closed"):
            await process.call(score(1))


async def test_closing_fails_a_call_that_was_made_just_before():
    async with environment() as process:
        waiting = asyncio.ensure_future(process.call(score(0)))
        for _ in range(3):
            await asyncio.sleep(0)
        await process.close()
        with pytest.raises(TaskError, match="closed"):
            await waiting


async def test_a_caller_that_left_is_not_waited_for():
    async with environment() as process:
        gone = asyncio.ensure_future(process.call(score(0)))
        await asyncio.sleep(0)
        gone.cancel()
        assert await outcomes(process, [1]) == {1: 1.0}


def test_it_dies_with_its_parent_even_while_user_code_never_returns():
    code = textwrap.dedent(
        f"""
        import asyncio, logging, os
        from titan_rl.sandbox.sandbox import Sandbox
        from titan_rl.sandbox.wire import Call, CallKind, EnvironmentSetup
        from titan_rl.types import Purpose

        class Heard(logging.Handler):
            def emit(self, record):
                if record.getMessage().startswith("hanging"):
                    hanging.set_result(record.getMessage().split()[1])

        logging.basicConfig(level=logging.INFO, handlers=[Heard()])

        async def main():
            global hanging
            hanging = asyncio.get_running_loop().create_future()
            setup = EnvironmentSetup(name={f"{UNRULY}:Unruly"!r}, kwargs={{"behaviour": {{"0": "hang"}}}}, run_seed=0)
            process = Sandbox(setup)
            await process.start()
            call = asyncio.ensure_future(process.call(Call(CallKind.SCORE, Purpose.TRAIN, 0)))
            print(process.pid, await hanging, flush=True)
            os.kill(os.getpid(), 9)

        asyncio.run(main())
        """
    )
    worker = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    left = [int(pid) for pid in worker.stdout.split()]
    assert len(left) == 2 and all(ends(pid) for pid in left)
