"""A fault ends the work in hand; none is lost."""

import asyncio
from threading import Thread

import pytest

from titan_rl.config_registry import copy4
from titan_rl.controller.faults import POLICY, FaultBoard, kind_of
from titan_rl.errors import ActorFailed, GeneratorFailed, MeshFailed, Stopped
from titan_rl.launch.placement import HostFacts, plan


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
    """A board that judges these meshes by the policy, and those of whose end the router was told."""
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


@pytest.mark.parametrize("mesh", ["trainer", "router", "rollout", "gateway"])
async def test_the_end_of_a_mesh_that_there_is_one_of_ends_the_run(mesh: str) -> None:
    board, told = serving("trainer", "generator0", "router", "rollout", "gateway")
    board.report(died(mesh))
    with pytest.raises(MeshFailed, match=f"{mesh} was killed"):
        await board.watch(forever())
    assert told == []


async def test_a_generator_that_dies_is_the_routers_business_while_another_one_lives() -> None:
    board, told = serving("generator0", "generator1")
    for _ in range(2):  # its ranks, one after the other
        board.report(died("generator0"))
    assert await board.watch(one_turn()) == 7
    assert told == ["generator0"] and board.settle() is None


async def test_the_last_generator_ends_the_run_with_the_reasons_of_all() -> None:
    board, told = serving("generator0", "generator1")
    board.report(died("generator1"))
    board.report(died("generator0"))
    with pytest.raises(MeshFailed, match="generator0 was killed; generator1 was killed"):
        await board.watch(forever())
    assert told == ["generator1", "generator0"]


async def test_a_generator_that_dies_before_it_is_ready_ends_the_start() -> None:
    board, told = serving("generator0")
    board.report(died("generator1"))
    with pytest.raises(MeshFailed, match="generator1 was killed"):
        await board.watch(forever())
    assert told == []


def test_the_policy_knows_every_mesh_that_is_placed() -> None:
    meshes = plan(copy4(), HostFacts(cpus=2)).meshes + plan(copy4(), HostFacts(cpus=2), serving=True).meshes
    assert {kind_of(mesh.name) for mesh in meshes} == set(POLICY)


async def test_a_second_request_to_stop_asks_to_hurry() -> None:
    announced: list[Exception] = []
    board = FaultBoard(announced.append)
    for _ in range(3):
        board.report(Stopped(2))
    with pytest.raises(Stopped):
        await board.watch(forever())
    await board.hurry.wait()
    assert len(announced) == 1
