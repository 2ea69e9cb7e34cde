"""A fault ends the work in hand; none is lost."""

import asyncio
from contextvars import ContextVar
from threading import Thread

import pytest

from titan_rl.config_registry import copy4
from titan_rl.controller.faults import LONGEST_PAUSE, LOST_WITH, SETTLED_SECONDS, FaultBoard, Restarts, kind_of
from titan_rl.errors import ActorFailed, GeneratorFailed, MeshFailed, Stopped
from titan_rl.launch.hosts.facts import HostFacts
from titan_rl.launch.placement import plan


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_fault_from_another_thread_ends_the_work() -> None:
    board = FaultBoard()
    watching = asyncio.create_task(board.watch(forever()))
    Thread(target=board.report, args=(ActorFailed("mesh generator0 failed"),)).start()
    with pytest.raises(ActorFailed, match="mesh generator0 failed"):
        await watching


async def test_a_fault_that_came_before_is_raised_by_the_next_watch() -> None:
    board = FaultBoard()
    board.report(ActorFailed("early"))
    with pytest.raises(ActorFailed, match="early"):
        await board.watch(forever())


async def test_the_works_own_error_says_more_and_wins() -> None:
    board = FaultBoard()

    async def work() -> None:
        board.report(ActorFailed("mesh generator0 failed"))
        await asyncio.sleep(0)
        raise GeneratorFailed("generator0 rank 1: lockstep lost")

    with pytest.raises(GeneratorFailed, match="lockstep lost"):
        await board.watch(work())


async def test_without_a_fault_the_result_comes_through() -> None:
    async def work() -> int:
        return 7

    assert await FaultBoard().watch(work()) == 7


async def test_cancelling_the_watch_cancels_the_work() -> None:
    board = FaultBoard()
    started = asyncio.Event()
    cancelled = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    watching = asyncio.create_task(board.watch(work()))
    await started.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert cancelled.is_set()


def died(mesh: str) -> MeshFailed:
    return MeshFailed(f"{mesh} was killed", mesh)


async def one_turn() -> int:
    await asyncio.sleep(0)
    return 7


def serving(*meshes: str) -> tuple[FaultBoard, list[str]]:
    """A board with these meshes up, and those whose loss was told."""
    board, told = FaultBoard(), []
    for mesh in meshes:
        board.ready(mesh, lambda fault: told.append(fault.mesh))
    return board, told


async def test_what_needs_a_mesh_ends_with_it_and_is_not_asked_any_more() -> None:
    board, _ = serving("generator0", "generator1")
    asked = []

    async def ask() -> None:
        asked.append(1)
        await forever()

    waiting = asyncio.create_task(board.unless_lost("generator1", ask()))
    board.report(died("generator0"))
    board.report(died("generator1"))
    for work in (waiting, board.unless_lost("generator1", ask())):
        with pytest.raises(MeshFailed, match="generator1 was killed"):
            await work
    assert asked == [1]


async def test_what_is_up_is_replaced_and_told_once_and_the_run_goes_on() -> None:
    meshes = ["trainer", "generator0", "router", "rollout0", "gateway"]
    board, told = serving(*meshes)
    for mesh in meshes:
        for _ in range(2):  # its ranks, one after the other
            board.report(died(mesh))
    assert await board.watch(one_turn()) == 7
    assert told == meshes and board.settle() is None


async def test_a_replacement_that_dies_while_it_starts_is_its_starters_business_alone() -> None:
    board, told = serving("generator0")
    board.report(died("generator0"))
    await asyncio.sleep(0)
    board.starts_again("generator0")
    starting = asyncio.create_task(board.unless_lost("generator0", forever()))
    await asyncio.sleep(0)
    board.report(died("generator0"))
    with pytest.raises(MeshFailed, match="generator0 was killed"):
        await starting
    assert await board.watch(one_turn()) == 7
    assert told == ["generator0"]


def test_a_mesh_that_fails_again_and_again_is_started_with_longer_pauses_and_at_last_not_at_all() -> None:
    restarts = Restarts(most=4)
    pauses = []
    while not restarts.exhausted:
        restarts.died(SETTLED_SECONDS - 1)
        pauses.append(restarts.pause)
    assert pauses == [0, 1, 2, 4, 8]
    restarts.died(SETTLED_SECONDS)
    assert restarts.pause == 0 and not restarts.exhausted, "it had worked for a while"


def test_a_mesh_may_fail_for_days() -> None:
    restarts = Restarts(most=0)
    for _ in range(10_000):
        restarts.died(0.0)
    assert restarts.pause == LONGEST_PAUSE


async def test_what_a_loss_leads_to_does_not_run_in_the_context_of_the_thread_that_reports_it() -> None:
    board, heard = FaultBoard(), asyncio.get_running_loop().create_future()
    whose = ContextVar("whose", default="the run's")
    board.ready("trainer", lambda fault: asyncio.ensure_future(tell()))

    async def tell() -> None:
        heard.set_result(whose.get())

    def report() -> None:
        whose.set("the reporter's")
        board.report(died("trainer"))

    Thread(target=report).start()
    assert await heard == "the run's"


async def test_a_generator_that_dies_before_it_is_ready_ends_the_start() -> None:
    board, told = serving("generator0")
    board.report(died("generator1"))
    with pytest.raises(MeshFailed, match="generator1 was killed"):
        await board.watch(forever())
    assert told == []


def test_what_is_lost_is_said_of_every_mesh_that_is_placed() -> None:
    hosts = HostFacts(cpus=2), HostFacts(cpus=2, name="host1")
    meshes = plan(copy4(), *hosts).meshes + plan(copy4(), *hosts, serving=True).meshes
    assert {kind_of(mesh.name) for mesh in meshes} == set(LOST_WITH)


async def test_a_second_request_to_stop_asks_to_hurry() -> None:
    announced: list[Exception] = []
    board = FaultBoard(announced.append)
    for _ in range(3):
        board.report(Stopped(2))
    with pytest.raises(Stopped):
        await board.watch(forever())
    await board.hurry.wait()
    assert len(announced) == 1


async def test_a_block_ends_with_the_first_fatal_fault_and_is_not_cancelled_after_it() -> None:
    board = FaultBoard()
    with pytest.raises(ActorFailed, match="the router was given up"):
        async with board.ends():
            board.report(ActorFailed("the router was given up"))
            await asyncio.Event().wait()
    board = FaultBoard()
    async with board.ends():
        board.report(ActorFailed("too late"))
    for _ in range(3):
        await asyncio.sleep(0)
