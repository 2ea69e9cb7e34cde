"""What is replaced when, with processes and clients that a test stands in for."""

from __future__ import annotations

import asyncio
import dataclasses
from contextvars import ContextVar
from threading import Thread

import pytest
from scripted_meshes import CPU, Runs, one_host, served, two_hosts

from titan_rl.config_registry import copy4
from titan_rl.errors import ActorFailed, ActorGone, MeshFailed, TitanError
from titan_rl.hosts.facts import HostFacts
from titan_rl.supervision import managed_mesh, supervisor

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("late", ["rollout0", "gateway"])
async def test_whoever_is_still_being_set_up_when_the_router_is_replaced_asks_the_new_one(
    runs: Runs, late: str
) -> None:
    run = await runs.begin(served() if late == "gateway" else copy4())
    run.clients[late].held.clear()
    start = asyncio.create_task(run.meshes.set_up(*run.meshes.meshes))
    while not run.clients[late].peers:
        await asyncio.sleep(0)
    assert run.clients[late].peers["router"] == "router.1"
    run.kill("router")
    await run.until_back("router")
    run.clients[late].held.set()
    await asyncio.wait_for(start, 5)
    assert run.clients[late].peers["router"] == "router.2"


async def test_generators_hear_of_the_relay_that_replaces_that_of_their_host(runs: Runs) -> None:
    run = await runs.up(two_hosts(), *CPU)
    there = run.generator_on("host1")
    run.kill("relay1")
    await run.until_back("relay1")
    assert run.clients[there].peers["relay"] == "relay1.2"


async def test_a_generator_that_starts_while_its_relay_is_replaced_hears_of_it(runs: Runs) -> None:
    run = await runs.up(two_hosts(), *CPU)
    there = run.generator_on("host1")
    run.clients[there].held.clear()
    run.kill(there, "relay1")
    await run.until_back("relay1")
    run.clients[there].held.set()
    await run.until_back(there)
    while run.clients[there].peers["relay"] != "relay1.2":
        await asyncio.sleep(0)


async def test_the_last_relay_hears_where_the_trainer_has_moved(runs: Runs) -> None:
    config = two_hosts()
    config = dataclasses.replace(config, placement=dataclasses.replace(config.placement, trainer=("host1",)))
    run = await runs.up(config, *CPU)
    run.lose("host1")
    await run.until_back("trainer", "generator1", "rollout0")
    assert list(run.clients["relay0"].peers["relays"]) == ["host0"]


async def test_where_devices_are_lost_only_what_has_no_room_is_left_out(runs: Runs) -> None:
    hosts = HostFacts(cpus=4, cuda_devices=(0, 1, 2)), HostFacts(cpus=4, cuda_devices=(0, 1), name="host1")
    config = two_hosts(restarts=1, device="cuda")
    run = await runs.up(config, *hosts)
    gone = run.generator_on("host1")
    run.lose("host1")
    await run.until(f"{gone} failed 2 times in a row and is left out")
    await run.until_back("rollout0")
    assert run.run_end.settle() is None


async def test_a_start_that_hangs_delays_no_other_replacement(runs: Runs) -> None:
    run = await runs.up(copy4())
    run.processes.born["generator0"] = asyncio.Event()
    run.kill("generator0", "generator1")
    await run.until_back("generator1")
    assert run.doing["generator0"] == "building the engine"
    run.processes.born["generator0"].set()
    await run.until_back("generator0")


@pytest.mark.parametrize("late", ["generator0", "relay1"])
async def test_processes_that_are_not_born_within_start_seconds_end_the_start_for_whoever_waits_for_them(
    runs: Runs, late: str
) -> None:
    run = await runs.begin(two_hosts(start_seconds=0.01), *CPU)
    run.processes.born[late] = asyncio.Event()
    with pytest.raises(MeshFailed, match=rf"{late}: its processes .* within 0.01 s \(placement.start_seconds\)"):
        await run.meshes.set_up(*run.meshes.meshes)
    await runs.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_processes_that_monarch_has_given_up_are_started_again(runs: Runs) -> None:
    run = await runs.begin(copy4())
    run.processes.late = ["error spawning proc mesh: statuses: Timeout(30.001001418s)=0..1"]
    await asyncio.wait_for(run.meshes.set_up(*run.meshes.meshes), 5)
    assert any("slow to start: they are started again" in line for line in run.said)
    assert [each.actor for each in run.clients.values() if each.actor.endswith(".2")] == ["trainer.2"]


async def test_a_gateway_that_is_slow_to_start_is_started_again_before_anything_serves(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await runs.begin(served())

    async def started(name: str) -> str:
        return "Timeout(30.001001418s)" if (name, run.clients[name].actor) == ("gateway", "gateway.1") else ""

    monkeypatch.setattr(run.processes, "started", started)
    await run.meshes.set_up(*(name for name in run.meshes.meshes if name != "gateway"))
    await run.meshes.set_up("gateway")
    assert run.clients["gateway"].actor == "gateway.2"
    assert {*run.doing.values()} == {"ready"}


async def test_a_mesh_that_fails_again_and_again_ends_the_run(runs: Runs) -> None:
    run = await runs.up(one_host(restarts=0))
    run.kill("router")
    await run.ended("router failed 1 time: router rank 0 was killed")


@pytest.mark.parametrize("wait", [False, True])
async def test_the_last_generators_are_awaited_or_end_the_run(runs: Runs, wait: bool) -> None:
    few = {"restarts": 0, "least_generators": 2, "too_few_generators": "wait" if wait else "end"}
    run = await runs.up(one_host(**few))
    run.kill("generator1")
    if wait:
        await run.until_back("generator1")
        assert run.run_end.settle() is None
    else:
        await run.ended("generator1 failed 1 time: .*; placement.least_generators is 2")


async def test_a_mesh_that_dies_before_it_is_up_ends_the_start(runs: Runs) -> None:
    run = await runs.begin(copy4())
    run.clients["generator1"].held.clear()
    start = run.run_end.watch(run.meshes.set_up(*run.meshes.meshes))
    run.kill("generator1")
    with pytest.raises(MeshFailed, match="generator1 rank 0 was killed"):
        await asyncio.wait_for(start, 5)


async def test_a_mesh_that_is_lost_before_it_is_born_is_not_set_up(runs: Runs) -> None:
    run = await runs.begin(copy4())
    run.processes.born["generator1"] = asyncio.Event()
    start = asyncio.ensure_future(run.run_end.watch(run.meshes.set_up(*run.meshes.meshes)))
    await asyncio.sleep(0)
    run.kill("generator1")
    run.processes.born["generator1"].set()
    with pytest.raises(MeshFailed, match="generator1 rank 0 was killed"):
        await asyncio.wait_for(start, 5)
    assert run.meshes.meshes["generator1"].births == 0 and run.clients["generator1"].peers == {}


async def test_a_replacement_that_dies_while_it_starts_is_logged_and_started_again(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    run = await runs.up(copy4())
    run.clients["generator1"].held.clear()
    run.kill("generator1", "generator1")  # its ranks, one after the other
    while run.clients["generator1"].actor != "generator1.2":
        await asyncio.sleep(0)
    run.kill("generator1")
    run.clients["generator1"].held.set()
    await run.until_back("generator1")
    assert run.clients["generator1"].actor == "generator1.3" and run.run_end.settle() is None
    assert "generator1 did not start again: generator1 rank 0 was killed" in caplog.text
    assert len(run.clients["generator1"].lost) == 2, "the client of a start that failed hears of it too"


async def test_what_needs_a_mesh_ends_with_it(runs: Runs) -> None:
    run = await runs.up(copy4())
    run.clients["trainer"].held.clear()
    waiting = asyncio.create_task(run.meshes.unless_lost("trainer", asyncio.Event().wait()))
    await asyncio.sleep(0)
    run.kill("trainer")
    for work in (waiting, run.meshes.unless_lost("trainer", asyncio.Event().wait())):
        with pytest.raises(MeshFailed, match="trainer rank 0 was killed"):
            await work


async def test_a_fault_from_a_thread_is_handled_in_the_context_of_the_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    whose, found = ContextVar("whose", default="the run's"), []
    run = await runs.up(copy4())
    spawn = run.processes.spawn
    monkeypatch.setattr(run.processes, "spawn", lambda *a, **b: (found.append(whose.get()), spawn(*a, **b))[1])

    def report() -> None:
        whose.set("the reporter's")
        run.kill("router")

    Thread(target=report).start()
    await run.until_back("router")
    assert {*found} == {"the run's"}


async def test_an_error_in_a_replacement_ends_the_run_instead_of_being_forgotten(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await runs.up(copy4())

    async def stop(*_: object, **__: object) -> None:
        raise KeyError("generator0")

    monkeypatch.setattr(run.processes, "stop", stop)
    run.kill("generator0")
    await run.ended("KeyError", TitanError)


async def test_a_mesh_whose_link_is_lost_while_its_processes_live_is_replaced(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GONE_SECONDS", 0.01)
    run = await runs.up(copy4())
    run.clients["router"].fails(ActorGone("router.pulse: a call without an outcome failed"))
    await run.until("lost router: router.pulse: a call without an outcome failed")
    await run.until_back("router")


async def test_a_router_that_ends_by_itself_is_replaced_and_again_and_again_ends_the_run(runs: Runs) -> None:
    run = await runs.up(one_host(restarts=1))
    run.clients["router"].fails(ActorFailed("router: KeyError: 'r'"))
    await run.until_back("router")
    run.clients["router"].fails(ActorFailed("router: KeyError: 'r'"))
    await run.ended("router failed 2 times in a row: router: KeyError: 'r'")


@pytest.mark.parametrize("worked", [False, True])
async def test_a_trainer_that_finishes_no_step_is_not_replaced_for_ever_however_long_it_lives(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, worked: bool
) -> None:
    monkeypatch.setattr(managed_mesh, "SETTLED_SECONDS", 0.0)
    run = await runs.up(one_host(restarts=1))
    run.clients["trainer"].has_worked = worked
    run.kill("trainer")
    await run.until_back("trainer")
    run.kill("trainer")
    if worked:
        await run.until_back("trainer")
        assert run.run_end.settle() is None
    else:
        await run.ended("trainer failed 2 times in a row: .* was killed")


async def test_of_a_process_that_is_gone_the_kernels_report_counts(runs: Runs) -> None:
    """Calls to it may fail before that."""
    run = await runs.up(copy4())
    run.clients["router"].fails(ActorGone("router.pulse: the process or actor is gone"))
    for _ in range(10):
        await asyncio.sleep(0)
    run.kill("router")
    await run.until_back("router")
    assert any(line.startswith("lost router: router rank 0 was killed") for line in run.said)


async def test_calls_that_fail_because_their_mesh_is_replaced_do_not_concern_the_new_one(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GONE_SECONDS", 0.0)
    run = await runs.up(copy4())
    router = run.clients["router"]
    monkeypatch.setattr(router, "lose", lambda reason: router.fails(ActorGone(reason)))
    run.kill("router")
    await run.until_back("router")
    await asyncio.sleep(0.05)
    assert router.actor == "router.2"
