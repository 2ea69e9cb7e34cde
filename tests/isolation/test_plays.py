"""Programs that fail in every way cost their own rollout and leave nothing behind (15 s: processes start)."""

import asyncio
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.processes import descendants, ends, halt
from support.rollouts import TASKS

from titan_rl.errors import ActorGone, TaskError
from titan_rl.isolation.pool import UserCodePool
from titan_rl.isolation.wire import EnvironmentSetup
from titan_rl.types import Endpoint, Purpose

PROGRAMS = TASKS / "programs.py"
ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", api_key="key of a rollout", model="policy")


def setup(cls="Programs", *, held_out=0, start_seconds=60.0, memory_mib=4096, **kwargs) -> EnvironmentSetup:
    return EnvironmentSetup(
        name=f"{PROGRAMS}:{cls}",
        kwargs=kwargs,
        run_seed=5,
        imports=(str(PROGRAMS),),
        start_seconds=start_seconds,
        held_out=held_out,
        memory_mib=memory_mib,
    )


def children() -> set[int]:
    """Of this process, zombies included."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@asynccontextmanager
async def programs(cls="Programs", **kwargs):
    await asyncio.sleep(0)
    children_before, descriptors_before = children(), descriptors()
    process = UserCodePool(setup(cls, **kwargs))
    try:
        await process.start()
        yield process
    finally:
        await process.close()
        await asyncio.sleep(0)  # transports close their descriptors in the next tick
        assert children() == children_before
        assert descriptors() <= descriptors_before


async def play(process, index=0, purpose=Purpose.TRAIN):
    state = await process.run_program(purpose, index, ENDPOINT)
    return None if state is None else pickle.loads(state)


@pytest.mark.parametrize("how", ["a command prints without end", "endless.py"])
async def test_endless_output_ends_at_the_bound_of_memory(how, tmp_path):
    (tmp_path / "endless.py").write_text("while True:\n    print('more' * 1000)\n")
    how = str(tmp_path / how) if how.endswith(".py") else how
    async with programs(behaviour={"0": how}, memory_mib=100) as process:
        with pytest.raises(TaskError, match=r"needed more memory than environment.memory_mib \(100\)"):
            await play(process)


async def test_plays_run_in_processes_of_their_own_that_share_what_was_imported():
    async with programs(behaviour=dict.fromkeys(map(str, range(4)), "who")) as process:
        told = await asyncio.gather(*(play(process, index) for index in range(4)))
        assert len({each["pid"] for each in told}) == 4
        assert all(each["session"] == each["pid"] for each in told)
        assert {each["imported by"] for each in told} == {process.pid}
        assert {each["key"] for each in told} == {"key of a rollout"}


@pytest.mark.parametrize("cls", ["Programs", "AsyncPrograms"])
async def test_what_a_play_returns_comes_back_pickled(cls):
    async with programs(cls, held_out=3, behaviour={"1": "nothing", "2": "large"}) as process:
        assert b"held out 2" in await process.run_program(Purpose.EVALUATE, 2, ENDPOINT)
        assert b"Note" in await process.run_program(
            Purpose.TRAIN, 7, ENDPOINT
        )  # nobody has to know the class to carry it
        assert await process.run_program(Purpose.TRAIN, 1, ENDPOINT) is None
        assert await play(process, 2) == b"x" * (8 << 20)
        with pytest.raises(TaskError, match="evaluate prompt 3: .*no held-out prompt 3"):
            await process.run_program(Purpose.EVALUATE, 3, ENDPOINT)


@pytest.mark.parametrize("cls", ["Programs", "AsyncPrograms"])
async def test_a_play_that_fails_costs_only_itself_and_says_why(cls):
    reasons = {
        "raise": r"ValueError: boom \(.*programs\.py:\d+ in misbehave\)",
        "exit": r"exit\(3\) was called",
        "crash": r"exited with code 3 and returned nothing",
        "vanish": r"exited with code 0 and returned nothing",
        "kill itself": r"was killed by signal 9 \(SIGKILL\) and returned nothing",
        "unpicklable": r"play returned a lock that does not pickle",
    }
    behaviour = {str(number): how for number, how in enumerate(reasons)}
    async with programs(cls, behaviour=behaviour) as process:
        host = process.pid
        plays = [process.run_program(Purpose.TRAIN, index, ENDPOINT) for index in range(len(reasons) + 2)]
        *failures, first, second = await asyncio.gather(*plays, return_exceptions=True)
        for number, (failure, reason) in enumerate(zip(failures, reasons.values(), strict=True)):
            assert isinstance(failure, TaskError)
            assert re.search(f"play of train prompt {number}: .*{reason}", str(failure))
        assert isinstance(first, bytes) and isinstance(second, bytes)
        assert process.pid == host and process.restarts == 0


async def test_hundreds_of_plays_wait_for_their_start_and_no_kill_of_theirs_is_lost(heard):
    """7 s. The socket to the fork server takes about 278 frames at a time, and none is read while that is stopped."""
    count = 400
    async with programs(behaviour=dict.fromkeys(map(str, range(count)), "rest")) as process:
        host = process.pid
        playing = [asyncio.ensure_future(process.run_program(Purpose.TRAIN, index, ENDPOINT)) for index in range(count)]
        async with asyncio.timeout(60):
            await heard.times("resting", count)
        family = descendants(host)
        assert len(family) == 2 * count and not any(play.done() for play in playing)
        halt(host)
        for play in playing:
            play.cancel()
        await asyncio.wait(playing)
        os.kill(host, signal.SIGCONT)
        assert all(await asyncio.gather(*(asyncio.to_thread(ends, pid) for pid in family)))
        assert await process.run_program(Purpose.TRAIN, count, ENDPOINT)
        assert process.pid == host and process.restarts == 0


async def test_a_cancelled_play_takes_along_whatever_it_started(heard):
    async with programs(behaviour={"0": "stubborn family"}) as process:
        playing = asyncio.ensure_future(process.run_program(Purpose.TRAIN, 0, ENDPOINT))
        family = await heard.numbers("family")
        playing.cancel()
        assert len(family) == 3
        for pid in family:
            assert await asyncio.to_thread(ends, pid)


async def test_a_play_is_over_when_what_it_left_behind_is_gone(heard):
    async with programs(behaviour={"0": "leaves family"}) as process:
        assert await process.run_program(Purpose.TRAIN, 0, ENDPOINT) is None
        family = await heard.numbers("family")
        assert [Path(f"/proc/{pid}").exists() for pid in family] == [False, False]


async def test_closing_ends_what_is_being_played(heard):
    async with programs(behaviour={"0": "stubborn family"}) as process:
        playing = asyncio.ensure_future(process.run_program(Purpose.TRAIN, 0, ENDPOINT))
        family = await heard.numbers("family")
        await process.close()
        with pytest.raises(TaskError, match="closed"):
            await playing
        assert not any(Path(f"/proc/{pid}").exists() for pid in family)
        with pytest.raises(TaskError, match="closed"):
            await process.run_program(Purpose.TRAIN, 1, ENDPOINT)


async def test_a_fork_server_that_is_killed_takes_its_plays_along_and_is_replaced(heard):
    async with programs(behaviour={"0": "burn", "1": "stubborn family"}) as process:
        host = process.pid
        playing = [asyncio.ensure_future(process.run_program(Purpose.TRAIN, index, ENDPOINT)) for index in range(2)]
        left = [*await heard.numbers("burning"), *await heard.numbers("family")]
        os.kill(host, signal.SIGKILL)
        for failure in await asyncio.gather(*playing, return_exceptions=True):
            assert isinstance(failure, ActorGone), "no fault of the program: its rollout is played again"
            assert "the process that it was forked from was killed by signal 9 (SIGKILL)" in str(failure)
        for pid in left:
            assert await asyncio.to_thread(ends, pid)
        again = await asyncio.gather(*(process.run_program(Purpose.TRAIN, index, ENDPOINT) for index in range(2, 6)))
        assert all(again) and process.restarts == 1 and process.pid != host


def test_everything_dies_with_the_worker():
    code = textwrap.dedent(
        f"""
        import asyncio, logging, os
        from titan_rl.isolation.wire import EnvironmentSetup
        from titan_rl.isolation.pool import UserCodePool
        from titan_rl.types import Endpoint, Purpose

        class Heard(logging.Handler):
            def emit(self, record):
                if record.getMessage().startswith("family"):
                    print(process.pid, *record.getMessage().split()[1:], flush=True)
                    os.kill(os.getpid(), 9)

        logging.basicConfig(level=logging.INFO, handlers=[Heard()])

        async def main():
            global process
            process = UserCodePool(EnvironmentSetup(
                name={f"{PROGRAMS}:Programs"!r}, kwargs={{"behaviour": {{"0": "stubborn family"}}}}, run_seed=0
            ))
            await process.start()
            await process.run_program(Purpose.TRAIN, 0, Endpoint(base_url="", api_key="", model=""))

        asyncio.run(main())
        """
    )
    worker = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    left = [int(pid) for pid in worker.stdout.split()]
    assert len(left) == 4 and all(ends(pid) for pid in left)


async def test_a_door_that_was_not_opened_says_so():
    with pytest.raises(TaskError, match="not started"):
        await UserCodePool(setup()).run_program(Purpose.TRAIN, 0, ENDPOINT)
