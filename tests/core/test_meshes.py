"""What is replaced when, with processes and clients that a test stands in for."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from scripted_meshes import CPU, Run, two_hosts, up

from titan_rl.config_registry import copy4
from titan_rl.errors import MeshFailed
from titan_rl.launch import meshes
from titan_rl.launch.hosts.facts import HostFacts
from titan_rl.launch.meshes import Meshes

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("late", ["rollout0", "gateway"])
async def test_whoever_is_still_being_set_up_when_the_router_is_replaced_asks_the_new_one(
    monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    run = await Run(monkeypatch, copy4(), serving=late == "gateway").begin()
    run.clients[late].held.clear()
    start = asyncio.create_task(run.meshes.set_up(*run.meshes.names))
    while run.clients[late].asks is None:
        await asyncio.sleep(0)
    assert run.clients[late].asks[0] == "router.1"
    run.kill("router")
    await run.until_back("router")
    run.clients[late].held.set()
    await asyncio.wait_for(start, 5)
    assert run.clients[late].asks[0] == "router.2"
    await run.meshes.close()


async def test_generators_hear_of_the_relay_that_replaces_that_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, two_hosts(), *CPU))
    there = next(name for name in ("generator0", "generator1") if run.clients[name].host == "host1")
    run.kill("relay1")
    await run.until_back("relay1")
    assert run.clients[there].relay == "relay1.2"
    await run.meshes.close()


async def test_a_generator_that_starts_while_its_relay_is_replaced_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, two_hosts(), *CPU))
    there = next(name for name in ("generator0", "generator1") if run.clients[name].host == "host1")
    run.clients[there].held.clear()
    run.kill(there, "relay1")
    await run.until_back("relay1")
    run.clients[there].held.set()
    await run.until_back(there)
    while run.clients[there].relay != "relay1.2":
        await asyncio.sleep(0)
    await run.meshes.close()


async def test_the_last_relay_hears_where_the_trainer_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    config = two_hosts()
    config = dataclasses.replace(config, placement=dataclasses.replace(config.placement, trainer=("host1",)))
    run = await up(Run(monkeypatch, config, *CPU))
    run.lose("host1")
    await run.until_back("trainer", "generator1", "rollout0")
    assert [relay.host for relay in run.clients["relay0"].asks[0]] == ["host0"]
    await run.meshes.close()


async def test_where_devices_are_lost_only_what_has_no_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = HostFacts(cpus=4, cuda_devices=(0, 1, 2)), HostFacts(cpus=4, cuda_devices=(0, 1), name="host1")
    config = two_hosts(restarts=1, device="cuda")
    run = await up(Run(monkeypatch, config, *hosts))
    gone = next(name for name in ("generator0", "generator1") if run.clients[name].host == "host1")
    run.lose("host1")
    await run.until(f"{gone} failed 2 times in a row and is left out")
    await run.until_back("rollout0")
    assert run.faults.settle() is None
    await run.meshes.close()


async def test_a_start_that_hangs_delays_no_other_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, copy4()))
    run.processes.born["generator0"] = asyncio.Event()
    run.kill("generator0", "generator1")
    await run.until_back("generator1")
    assert run.doing["generator0"] == "building the engine"
    run.processes.born["generator0"].set()
    await run.until_back("generator0")
    await run.meshes.close()


async def test_processes_that_are_not_born_within_start_seconds_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy4()
    config = dataclasses.replace(config, placement=dataclasses.replace(config.placement, start_seconds=0.01))
    run = await Run(monkeypatch, config).begin()
    run.processes.born["generator0"] = asyncio.Event()
    with pytest.raises(MeshFailed, match=r"generator0: its processes .* within 0.01 s \(placement.start_seconds\)"):
        await run.meshes.set_up(*run.meshes.names)
    await run.meshes.close()


async def test_processes_that_monarch_has_given_up_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await Run(monkeypatch, copy4()).begin()
    run.processes.late = ["error spawning proc mesh: statuses: Timeout(30.001001418s)=0..1"]
    await asyncio.wait_for(run.meshes.set_up(*run.meshes.names), 5)
    assert any("slow to start: all are started again" in line for line in run.said)
    assert run.clients["generator0"].actor == "generator0.2"
    await run.meshes.close()


async def test_a_gateway_that_is_slow_to_start_is_started_again_before_anything_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = await Run(monkeypatch, copy4(), serving=True).begin()

    async def started(name: str) -> str:
        return "Timeout(30.001001418s)" if (name, run.clients[name].actor) == ("gateway", "gateway.1") else ""

    monkeypatch.setattr(run.processes, "started", started)
    await run.meshes.set_up(*(name for name in run.meshes.names if name != "gateway"))
    await run.meshes.set_up("gateway")
    assert run.clients["gateway"].asks == ("router.2",)
    assert {*run.doing.values()} == {"ready"}
    await run.meshes.close()


async def test_a_host_that_is_lost_again_and_again_is_awaited_by_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def rejoin(meshes: Meshes, name: str, worker: str) -> None:
        back = asyncio.Event()
        asked.put_nowait(back)
        await back.wait()

    monkeypatch.setattr(meshes, "rejoin", rejoin)
    run = Run(monkeypatch, copy4())
    run.meshes.workers["host1"] = "10.0.0.2:17000"
    await run.meshes.join({})
    for _ in range(2):
        for _ in range(3):
            run.processes.on_lost(SimpleNamespace(name="host1", lost="host1 is lost"))
        back = await asyncio.wait_for(asked.get(), 5)
        await asyncio.sleep(0)
        assert asked.empty()
        back.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await run.meshes.close()
