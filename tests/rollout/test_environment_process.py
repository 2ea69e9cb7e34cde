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
from processes import ends

from titan_rl.errors import TaskError
from titan_rl.sandbox.environment_process import MAX_PROCESSES, EnvironmentProcess
from titan_rl.sandbox.environment_wire import Asked, Call, CallKind, EnvironmentSetup, ProgressCell
from titan_rl.types import FinishReason, Message, Purpose

TASKS = Path(__file__).parent / "unruly_task.py"


@asynccontextmanager
async def environment(
    cls="Unruly", *, step_seconds=20.0, slow_seconds=1.0, start_seconds=60.0, held_out=0, prompts=0, **kwargs
):
    process = EnvironmentProcess(
        EnvironmentSetup(
            name=f"{TASKS}:{cls}",
            kwargs=kwargs,
            run_seed=5,
            imports=(str(TASKS),),
            step_seconds=step_seconds,
            slow_seconds=slow_seconds,
            start_seconds=start_seconds,
            held_out=held_out,
            prompts=prompts,
        )
    )
    try:
        process.info = await process.start()
        yield process
    finally:
        pid = process.pid
        await process.close()
        assert pid is None or not Path(f"/proc/{pid}").exists()  # neither running nor a zombie


def score(index, purpose=Purpose.TRAIN) -> Call:
    messages = (Message("user", f"{index}="), Message("assistant", "1"))
    return Call(CallKind.SCORE, purpose, index, messages, (FinishReason.STOP,))


async def outcomes(process, indices):
    """reward or error text, by index."""
    calls = [process.call(score(index)) for index in indices]
    results = await asyncio.gather(*calls, return_exceptions=True)
    return {
        index: str(result) if isinstance(result, TaskError) else result[0]
        for index, result in zip(indices, results, strict=True)
    }


async def test_calls_of_one_tick_travel_in_one_message():
    async with environment(step_seconds=600.0, slow_seconds=150.0) as process:
        assert await outcomes(process, range(256)) == dict.fromkeys(range(256), 1.0)
        assert process.batches_sent == 1
        await outcomes(process, range(256))
        assert process.batches_sent == 2


async def test_calls_made_while_a_batch_runs_gather_for_the_next():
    async with environment(step_seconds=600.0, slow_seconds=150.0) as process:
        os.kill(process.pid, signal.SIGSTOP)  # the first batch runs for as long as the test likes
        first = asyncio.ensure_future(process.call(score(0)))
        while not process.batches_sent:
            await asyncio.sleep(0)
        late = []
        for index in range(1, 50):  # each in a tick of its own
            late.append(asyncio.ensure_future(process.call(score(index))))
            await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.gather(first, *late)
        assert process.batches_sent == 2


@pytest.mark.parametrize(
    ("how", "reason", "restarts"),
    [
        ("raise", r"ValueError: boom \(.*unruly_task\.py:\d+ in misbehave\)", 0),
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
        pid = process.pid
        result = await outcomes(process, range(8))
        assert "score of train prompt 3: did not finish within 0.5 s and was killed" in result.pop(3)
        assert "prompt 6: did not finish" in result.pop(6)
        assert result == dict.fromkeys([0, 1, 2, 4, 5, 7], 1.0)
        assert process.restarts == 2 and process.pid != pid
        assert not Path(f"/proc/{pid}").exists()


async def test_calls_about_other_prompts_do_not_wait_for_one_that_hangs():
    behaviour = {"0": "hang"}
    async with environment(behaviour=behaviour, step_seconds=600.0, slow_seconds=0.1) as process:
        hung = [asyncio.ensure_future(process.call(score(0))) for _ in range(20)]
        assert await outcomes(process, range(1, 8)) == dict.fromkeys(range(1, 8), 1.0)
        assert not any(call.done() for call in hung) and process.restarts == 0


@pytest.mark.parametrize("how", ["hang", "crash"])
async def test_that_every_call_hangs_or_crashes_is_known_after_a_few(how):
    async with environment(behaviour={str(index): how for index in range(200)}, step_seconds=1.0) as process:
        result = await outcomes(process, range(200))
        untried = [error for error in result.values() if re.search(r"was not tried after \d+ in a row failed", error)]
        assert len(untried) >= 200 - 3 * MAX_PROCESSES
        odd = [each for each in result.values() if not re.search("did not finish within 1 s|exited with code 7", each)]
        assert odd == []
        assert process.restarts <= 6 * MAX_PROCESSES
        assert await outcomes(process, [200]) == {200: 1.0}  # the next one is tried again


async def test_a_prompt_whose_calls_all_hang_costs_no_other_prompt():
    async with environment(behaviour={"0": "hang"}, step_seconds=0.5) as process:
        calls = [process.call(score(0)) for _ in range(12)] + [process.call(score(1)) for _ in range(12)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, TaskError) for result in results[:12])
        assert [reward for reward, _ in results[12:]] == [1.0] * 12


async def test_a_process_killed_from_outside_costs_nothing():
    async with environment() as process:
        await outcomes(process, range(4))
        os.kill(process.pid, signal.SIGKILL)
        assert await outcomes(process, range(4)) == dict.fromkeys(range(4), 1.0)
        assert process.restarts == 1


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
        assert "nor when cancelled" in result.pop(5)
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
        assert process.info == (7, 3, False, (), False, False)
        asked = await process.call(Call(CallKind.EXAMPLE, Purpose.TRAIN, 7 + 2))
        assert asked == Asked((Message("user", "2="),))  # the stream starts over; the answer stays where it is
        assert await process.call(score(2, Purpose.EVALUATE))
        with pytest.raises(TaskError, match="no held-out prompt 3"):
            await process.call(score(3, Purpose.EVALUATE))
    async with environment("Countdown", size=7, prompts=4) as process:
        assert process.info == (4, 0, True, (), False, False)


async def test_closing_fails_the_calls_that_wait():
    async with environment(behaviour={"0": "hang"}) as process:
        waiting = asyncio.ensure_future(process.call(score(0)))
        while not process.batches_sent:
            await asyncio.sleep(0)
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
        from titan_rl.sandbox.environment_process import EnvironmentProcess
        from titan_rl.sandbox.environment_wire import Call, CallKind, EnvironmentSetup
        from titan_rl.types import Purpose

        class Heard(logging.Handler):
            def emit(self, record):
                if "hanging" in record.getMessage():
                    hanging.set()

        hanging = asyncio.Event()
        logging.basicConfig(level=logging.INFO, handlers=[Heard()])

        async def main():
            setup = EnvironmentSetup(name={f"{TASKS}:Unruly"!r}, kwargs={{"behaviour": {{"0": "hang"}}}}, run_seed=0)
            process = EnvironmentProcess(setup)
            await process.start()
            call = asyncio.ensure_future(process.call(Call(CallKind.SCORE, Purpose.TRAIN, 0)))
            await hanging.wait()
            print(process.pid, flush=True)
            os.kill(os.getpid(), 9)

        asyncio.run(main())
        """
    )
    worker = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ends(int(worker.stdout))


def test_the_progress_cell_is_shared_by_its_descriptor():
    cell = ProgressCell.create()
    other = ProgressCell(os.dup(cell.fd))
    cell.mark(12)
    position, age = other.read()
    assert position == 12 and 0 <= age < 60
    other.close()
    cell.close()
