"""User code that wants too much memory, prints or answers too much costs its own call and nothing else (20 s)."""

import asyncio
import logging
import os
import re
import select
import signal
import socket

import pytest
from support.rollouts import UNRULY

from titan_rl.environments.rubric import Transcript
from titan_rl.errors import InfrastructureFailed, TaskError
from titan_rl.isolation import process_io
from titan_rl.isolation.pool import UserCodePool
from titan_rl.isolation.user_code import UserCode
from titan_rl.isolation.wire import CallKind, EnvironmentSetup, UserCall, pack_order
from titan_rl.types import FinishReason, Message, Purpose

CONVERSATION = Transcript((Message("user", "0="), Message("assistant", "0")), (FinishReason.STOP,))


async def scores(how: str, *, cls: str = "Unruly", prompts: int = 6, restarts: int = 0, **settings) -> tuple[dict, int]:
    """What becomes of the scores of some prompts of which number 3 misbehaves; and how many processes ended."""
    kwargs = {"behaviour": {"3": how}}
    pool = UserCodePool(
        EnvironmentSetup(name=f"{UNRULY}:{cls}", kwargs=kwargs, run_seed=5, imports=(UNRULY,), **settings)
    )
    try:
        await pool.start()
        calls = (UserCall(CallKind.SCORE, Purpose.TRAIN, prompt, CONVERSATION) for prompt in range(prompts))
        outcomes = await asyncio.gather(*map(pool.call, calls), return_exceptions=True)
        async with asyncio.timeout(20):
            while pool.restarts < restarts:
                await asyncio.sleep(0)
        return dict(enumerate(outcomes)), pool.restarts
    finally:
        await pool.close()


@pytest.mark.parametrize("how", ["hog", "hoard", "a child hogs"])
@pytest.mark.parametrize("cls", ["Unruly", "UnrulyAsync"])
async def test_a_call_that_wants_too_much_memory_costs_itself(how, cls):
    ends = how != "a child hogs"  # what it hoards goes with its process
    outcomes, restarts = await scores(how, cls=cls, restarts=ends, memory_mib=200)
    wrong = outcomes.pop(3)
    assert isinstance(wrong, TaskError) and isinstance(wrong, InfrastructureFailed) == ends and restarts == ends
    if how == "a child hogs":
        assert "returned non-zero exit status" in str(wrong)
    else:
        assert "score of train prompt 3: needed more memory than environment.memory_mib (200)" in str(wrong)
    assert [reward for reward, _ in outcomes.values()] == [1.0] * 5


async def test_an_answer_that_is_too_long_costs_its_call():
    outcomes, _ = await scores("shout")
    assert re.search(r"prompt 3: answered \d+ MiB; the bound is 16 MiB", str(outcomes.pop(3)))
    assert [reward for reward, _ in outcomes.values()] == [1.0] * 5


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("forge", "wrote what is no answer .* and was killed by signal"),
        ("flood", r"wrote what is no answer \(a frame of \d{19} bytes; .* and was killed by signal"),
        ("lie", "answered something else than was asked for: Expected `array`"),
    ],
)
async def test_what_user_code_writes_into_its_socket_is_read_as_data_and_costs_its_call(how, why, capsys):
    outcomes, _ = await scores(how)
    assert re.search(f"prompt 3: its process {why}", str(outcomes.pop(3)))
    assert [reward for reward, _ in outcomes.values()] == [1.0] * 5
    assert "forged" not in capsys.readouterr().out


async def test_what_a_process_answered_before_it_wrote_something_else_counts():
    outcomes, restarts = await scores("answer, then forge", prompts=4, restarts=1)
    assert [reward for reward, _ in outcomes.values()] == [1.0] * 4 and restarts == 1


async def test_user_code_sees_no_secrets_but_those_that_are_named(monkeypatch, caplog):
    secrets = ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_GRADER_KEY")
    for name in (*secrets, "HF_HOME", "LC_TIME"):
        monkeypatch.setenv(name, "C")
    caplog.set_level(logging.INFO, logger=process_io.__name__)
    outcomes, _ = await scores("tell variables", variables=("MY_GRADER_KEY",))
    assert "ValueError: PATH HOME HF_HOME LC_TIME MY_GRADER_KEY (" in str(outcomes[3])
    assert re.search("does not see these variables.* HF_TOKEN .*OPENAI_API_KEY", caplog.text)


async def test_control_characters_of_user_code_reach_the_log_as_escapes(caplog):
    caplog.set_level(logging.INFO, logger="titan_rl.isolation")
    outcomes, _ = await scores("escape")
    assert r"\x1b[2Jred" in caplog.text and r"\x1b[2Jboom" in caplog.text and "\x1b" not in caplog.text
    assert "\x1b" not in str(outcomes[3])


def test_a_long_answer_to_a_busy_worker_holds_up_no_other_async_grader():
    """The worker reads nothing until another grader of the same process has gone on."""
    kwargs = {"behaviour": {"0": "tell all", "1": "step on"}}
    setup = EnvironmentSetup(name=f"{UNRULY}:UnrulyAsync", kwargs=kwargs, run_seed=5, imports=(UNRULY,))
    worker, connection = socket.socketpair()
    said, output = os.pipe()
    if (pid := os.fork()) == 0:
        worker.close()
        os.dup2(output, 1)
        UserCode(setup).serve(connection)
    try:
        for number in range(2):
            call = UserCall(CallKind.SCORE, Purpose.TRAIN, number, CONVERSATION)
            worker.sendall(pack_order((number, call)))
        ready = select.poll()
        ready.register(said, select.POLLIN)
        assert ready.poll(20_000) and os.read(said, 100) == b"went on\n"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for descriptor in (worker.detach(), connection.detach(), said, output):
            os.close(descriptor)


async def test_endless_output_is_logged_up_to_a_bound(caplog, monkeypatch):
    monkeypatch.setattr(process_io, "LOG_BYTES", 1000)
    caplog.set_level(logging.INFO, logger=process_io.__name__)
    outcomes, _ = await scores("print for ever", grade_seconds=1.0)
    assert "prompt 3: did not finish within 1 s" in str(outcomes.pop(3))
    assert [reward for reward, _ in outcomes.values()] == [1.0] * 5
    said = [record.getMessage() for record in caplog.records if record.name == process_io.__name__]
    assert sum(map(len, said)) < 1_000_000
    assert any(re.fullmatch(r"\d+ bytes of output were not logged: user code printed too much", each) for each in said)
