"""Hosts that join, come back and leave, and generators that are added and taken away."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripted_meshes import CPU, Run, two_hosts, up

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.controller.faults import Restarts
from titan_rl.errors import ConfigError, HostLost
from titan_rl.fleet import ask
from titan_rl.launch import fleet
from titan_rl.launch.fleet import FleetControl, controlled
from titan_rl.launch.hosts.facts import HostFacts

pytestmark = pytest.mark.asyncio


def one_host(**placement: Any) -> RunConfig:
    config = copy4()
    return dataclasses.replace(config, placement=dataclasses.replace(config.placement, **placement))


def there(run: Run) -> dict[str, list[str]]:
    """Meshes by host."""
    meshes: dict[str, list[str]] = {host: [] for host in run.meshes.hosts}
    for mesh in run.meshes.placement.meshes:
        meshes[mesh.hosts[0]].append(mesh.name)
    return meshes


async def test_a_generator_is_added_and_another_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, one_host()))
    control = FleetControl(run.meshes)
    assert "generator2 is up on host0" in (await control.do("add", [], None))[0]
    assert run.clients["router"].joined == [("generator2", "generator2.1")]
    await control.do("drain", ["generator0"], None)
    assert run.clients["router"].drained == ["generator0"] and run.clients["router"].serving == 2
    await run.until("generator0 leaves: it was taken away by command")
    assert [name for name in run.meshes.names if "generator" in name] == ["generator1", "generator2"]
    await control.do("add", [], 1)
    assert "generator3" in run.meshes.generators, "no name is used twice"
    assert run.faults.settle() is None
    await run.meshes.close()


async def test_what_is_removed_while_it_is_drained_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, one_host()))
    control, router = FleetControl(run.meshes), run.clients["router"]
    router.held.clear()
    drained = asyncio.create_task(control.do("drain", ["generator0"], None))
    while not router.drained:
        await asyncio.sleep(0)
    assert await asyncio.wait_for(control.do("remove", ["generator0"], None), 5) == ["generator0 has left"]
    assert await drained == ["generator0 has left"]
    assert run.meshes.fleet == ["generator1"]
    await run.meshes.close()


async def test_a_spare_leaves_though_no_generator_may(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, one_host(least_generators=2, spares=1)))
    control, router = FleetControl(run.meshes), run.clients["router"]
    router.spares = ["generator2"]
    with pytest.raises(ConfigError, match="generator0 stays"):
        await control.do("remove", ["generator0"], None)
    assert await control.do("remove", ["generator2"], None) == ["generator2 has left"]
    assert run.meshes.fleet == ["generator0", "generator1"] and router.serving == 2
    with pytest.raises(ConfigError, match="generator0 stays"):
        await control.do("remove", ["generator0"], None)
    await run.meshes.close()


async def test_a_leaving_host_takes_its_spare_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, two_hosts(least_generators=2, spares=1), *CPU))
    run.meshes.workers["host1"] = "10.0.0.2:17000"
    router, (spare, *others) = run.clients["router"], [name for name in there(run)["host1"] if "generator" in name]
    router.spares = [spare]
    await FleetControl(run.meshes).do("remove", ["host1"], None)
    await run.until_back(*others)
    assert len(run.meshes.fleet) == router.serving == 2 and spare not in run.meshes.names
    await run.meshes.close()


@pytest.mark.parametrize(
    ("verb", "names", "generators", "error"),
    [
        ("remove", ["generator0"], None, "generator0 stays: placement.least_generators is 2"),
        ("add", [], 2, "there are 2 generators, and placement.most_generators is 3"),
        ("drain", ["generator7"], None, "no host or generator 'generator7'; there are host0, generator0, generator1"),
        ("remove", ["host0"], None, "host0 stays: it has the controller"),
        ("add", ["10.0.0.2:1"], None, "start it with --placement.address"),
    ],
)
async def test_what_cannot_be_done_changes_nothing(
    verb: str, names: list[str], generators: int | None, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await up(Run(monkeypatch, one_host(least_generators=2, most_generators=3)))
    before = run.meshes.placement
    with pytest.raises(ConfigError, match=error):
        await FleetControl(run.meshes).do(verb, names, generators)
    assert run.meshes.placement.meshes == before.meshes and run.meshes.fleet == ["generator0", "generator1"]
    await run.meshes.close()


async def test_a_host_that_joins_a_lone_one_gets_a_relay_and_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, one_host(trusted_network=True)))
    run.meshes.config.placement.address = "10.0.0.1"  # not before, when this process would have to listen there
    said = await FleetControl(run.meshes).do("add", ["10.0.0.2:17000"], None)
    assert said[0] == "host1 (10.0.0.2:17000) has joined" and "generator2 is up on host1" in said[1]
    assert there(run)["host1"] == ["relay1", "generator2"]
    assert [relay.host for relay in run.clients["relay1"].asks[0]] == ["host0", "host1"]
    assert run.clients["generator2"].relay == "relay1.1"
    assert run.clients["generator0"].relay == run.clients["generator1"].relay == "relay0.1"
    with pytest.raises(ConfigError, match="is host1 already"):
        await FleetControl(run.meshes).do("add", ["10.0.0.2:17000"], None)
    await run.meshes.close()


async def test_what_a_leaving_host_has_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, two_hosts(least_generators=1), *CPU))
    run.meshes.workers["host1"] = "10.0.0.2:17000"
    gone = next(name for name in there(run)["host1"] if "generator" in name)
    await FleetControl(run.meshes).do("drain", ["host1"], None)
    await run.until_back("rollout0")
    assert [*run.meshes.hosts] == ["host0"] and run.clients["router"].drained == [gone]
    assert Counter(there(run)["host0"])["rollout0"] == 1 and gone not in run.meshes.names
    assert run.doing["rollout0"] == "ready" and run.doing[gone] == run.doing["relay1"] == ""
    assert [relay.host for relay in run.clients["relay0"].asks[0]] == ["host0"]
    await run.meshes.close()


async def test_a_leaving_host_leaves_the_least_number_of_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, two_hosts(least_generators=2), *CPU))
    run.meshes.workers["host1"] = "10.0.0.2:17000"
    moves = next(name for name in there(run)["host1"] if "generator" in name)
    await FleetControl(run.meshes).do("remove", ["host1"], None)
    await run.until_back(moves)
    assert there(run) == {"host0": run.meshes.names} and moves in run.meshes.names
    await run.meshes.close()


async def test_a_host_stays_if_nothing_else_has_room_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = HostFacts(cpus=4, cuda_devices=(0, 1, 2)), HostFacts(cpus=4, cuda_devices=(0, 1), name="host1")
    run = await up(Run(monkeypatch, two_hosts(least_generators=2, device="cuda"), *hosts))
    with pytest.raises(ConfigError, match="host1 stays: no other host has room for generator"):
        await FleetControl(run.meshes).do("drain", ["host1"], None)
    assert not run.meshes.leaving and len(there(run)["host1"]) > 1
    await run.meshes.close()


async def test_a_lost_host_is_taken_back_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, two_hosts(), *CPU)
    monkeypatch.setattr(fleet, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(Restarts, "pause", 0.0)
    await up(run)
    run.meshes.workers["host1"] = "10.0.0.2:17000"
    host, attach = run.processes.hosts["host1"], run.processes.attach
    host.lost = "host1 is lost"

    async def refuse_twice(*hosts: Any, **options: Any) -> None:
        tries.append(hosts)
        if len(tries) < 3:
            raise HostLost("nobody answers")
        await attach(*hosts, **options)

    tries: list[Any] = []
    monkeypatch.setattr(run.processes, "attach", refuse_twice)
    run.lose("host1")
    run.meshes._host_lost(host)
    await run.until("host1 (10.0.0.2:17000) is back")
    await asyncio.wait_for(run.meshes.until(lambda: run.meshes.up.keys() == {*run.meshes.names}), 5)
    assert len(tries) == 3 and "relay1" in there(run)["host1"]
    await run.meshes.close()


async def test_a_lost_host_that_is_removed_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, two_hosts(), *CPU))
    run.meshes.workers["host1"] = "10.0.0.2:17000"
    run.lose("host1")
    await FleetControl(run.meshes).do("remove", ["host1"], None)
    assert run.meshes.workers == {}
    await run.meshes.close()


async def test_commands_come_through_the_run_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = await up(Run(monkeypatch, one_host()))
    link = tmp_path / "control"
    link.symlink_to("/nowhere")
    async with controlled(run.meshes, tmp_path):
        command = {"verb": "show", "names": [], "generators": None}
        shown = (await asyncio.to_thread(ask, tmp_path, command))["lines"]
        assert shown[0].startswith("host0: 2 CPUs") and any("generator1" in line for line in shown)
        refused = await asyncio.to_thread(ask, tmp_path, {**command, "verb": "remove", "names": ["generator9"]})
        assert "there is no host or generator" in json.dumps(refused)
        assert os.stat(Path(os.readlink(link)).parent).st_mode & 0o077 == 0, "only this user can connect"
    assert not link.is_symlink()
    with pytest.raises(ConfigError, match="of no run that is up"):
        ask(tmp_path, command)
    await run.meshes.close()


async def test_what_leaves_by_command_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, two_hosts(least_generators=1, restarts=0), *CPU))
    run.meshes.workers["host1"] = "10.0.0.2:17000"
    await FleetControl(run.meshes).do("remove", ["host1"], None)
    await run.until_back("rollout0")
    assert run.faults.settle() is None
    await run.meshes.close()


async def test_a_host_that_stays_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = HostFacts(cpus=4, cuda_devices=(0, 1, 2)), HostFacts(cpus=4, cuda_devices=(0, 1), name="host1")
    run = await up(Run(monkeypatch, two_hosts(least_generators=2, device="cuda", trusted_network=True), *hosts))
    run.meshes.workers["host1"] = "10.0.0.2:17000"
    before = run.meshes.placement.meshes
    with pytest.raises(ConfigError, match="host1 stays"):
        await FleetControl(run.meshes).do("remove", ["host1"], None)
    assert run.meshes.placement.meshes == before
    await run.meshes.close()


async def test_a_name_is_never_given_to_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up(Run(monkeypatch, one_host(trusted_network=True)))
    run.meshes.config.placement.address = "10.0.0.1"
    control = FleetControl(run.meshes)
    await control.do("add", ["10.0.0.2:1", "10.0.0.3:1"], None)
    await control.do("remove", ["host1"], None)
    await control.do("add", ["10.0.0.4:1"], None)
    assert run.meshes.workers == {"host2": "10.0.0.3:1", "host3": "10.0.0.4:1"}
    await run.meshes.close()


async def test_what_had_no_room_comes_before_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarts, "pause", 0.0)
    hosts = HostFacts(cpus=4, cuda_devices=(0, 1, 2)), HostFacts(cpus=4, cuda_devices=(0, 1), name="host1")
    run = await up(Run(monkeypatch, two_hosts(restarts=0, device="cuda", trusted_network=True), *hosts))
    run.meshes.config.placement.address = "10.0.0.1"
    run.processes.devices = (0, 1)
    gone = next(name for name in there(run)["host1"] if "generator" in name)
    run.lose("host1")
    await run.until("is left out")
    await FleetControl(run.meshes).do("add", ["10.0.0.5:1"], None)
    assert run.meshes.placement.mesh(gone).hosts == ("host1", "host1") and gone in run.meshes.up
    await run.meshes.close()
