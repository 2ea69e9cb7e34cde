"""Hosts that join, come back and leave."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_meshes import CPU, Run, Runs, one_host, two_hosts

from titan_rl.config import RunConfig
from titan_rl.errors import ConfigError, HostLost
from titan_rl.hosts import elastic
from titan_rl.hosts.elastic import HostControl, ask, controlled
from titan_rl.hosts.facts import HostFacts

pytestmark = pytest.mark.asyncio

CUDA = HostFacts(cpus=4, cuda_devices=(0, 1, 2)), HostFacts(cpus=4, cuda_devices=(0, 1), name="host1")


async def commanded(runs: Runs, config: RunConfig, *hosts: HostFacts) -> tuple[Run, HostControl]:
    """A run to which hosts can be added. Its second host, if it has one, is a worker."""
    run = await runs.up(config, *hosts)
    run.meshes.config.placement.address = "10.0.0.1"  # not before, when this process would have to listen there
    if hosts:
        run.hosts.workers["host1"], run.hosts._hosts_ever = "10.0.0.2:17000", 1
    return run, run.hosts


def there(run: Run) -> dict[str, list[str]]:
    """Meshes by host."""
    placed = run.meshes.table.placed
    return {host: [mesh.name for mesh in placed if host in mesh.plan.hosts] for host in run.processes.hosts}


async def test_a_host_that_joins_a_lone_one_gets_a_relay_and_a_generator(runs: Runs) -> None:
    run, control = await commanded(runs, one_host(trusted_network=True))
    said = await control.do("add", ["10.0.0.2:17000"])
    assert said[0] == "host1 (10.0.0.2:17000) has joined" and "generator2 is up on host1" in said[1]
    assert there(run)["host1"] == ["relay1", "generator2"]
    assert run.clients["router"].joined[-1] == ("generator2", "generator2.1") and run.clients["router"].serving == 3
    assert list(run.clients["relay1"].peers["relays"]) == ["host0", "host1"]
    assert run.clients["generator2"].peers["relay"] == "relay1.1"
    assert run.clients["generator0"].peers["relay"] == run.clients["generator1"].peers["relay"] == "relay0.1"
    with pytest.raises(ConfigError, match="is host1 already"):
        await control.do("add", ["10.0.0.2:17000"])


async def test_what_a_leaving_host_has_goes_elsewhere_and_has_not_failed(runs: Runs) -> None:
    run, control = await commanded(runs, two_hosts(least_generators=1, restarts=0), *CPU)
    gone = run.generator_on("host1")
    await control.do("remove", ["host1"])
    await run.until_back("rollout0")
    assert [*run.processes.hosts] == ["host0"] and run.clients["router"].serving == 1
    assert "rollout0" in there(run)["host0"] and gone not in there(run)["host0"]
    assert run.doing["rollout0"] == "ready" and run.doing[gone] == run.doing["relay1"] == ""
    assert list(run.clients["relay0"].peers["relays"]) == ["host0"]
    assert run.run_end.settle() is None


async def test_a_host_may_leave_whose_generator_was_left_out_before(runs: Runs) -> None:
    run, control = await commanded(runs, two_hosts(least_generators=1, restarts=0), *CPU)
    gone = run.generator_on("host1")
    run.kill(gone)
    await run.until(f"{gone} failed 1 time and is left out")
    await control.do("remove", ["host1"])
    await run.until_back("rollout0")
    assert [*run.processes.hosts] == ["host0"] and gone not in run.meshes.table.fleet
    assert run.run_end.settle() is None


async def test_a_leaving_host_leaves_the_least_number_of_generators(runs: Runs) -> None:
    run, control = await commanded(runs, two_hosts(least_generators=2), *CPU)
    moves = run.generator_on("host1")
    await control.do("remove", ["host1"])
    await run.until_back(moves)
    assert moves in there(run)["host0"]


async def test_a_leaving_host_takes_its_spare_with_it(runs: Runs) -> None:
    run, control = await commanded(runs, two_hosts(least_generators=2, spares=1), *CPU)
    router, (spare, *others) = run.clients["router"], [name for name in there(run)["host1"] if "generator" in name]
    router.spares = [spare]
    await control.do("remove", ["host1"])
    await run.until_back(*others)
    assert len(run.meshes.table.fleet) == router.serving == 2 and spare not in run.meshes.meshes


@pytest.mark.parametrize(
    ("verb", "name", "error"),
    [
        ("remove", "host1", "host1 stays: no other host has room for generator"),
        ("remove", "host0", "host0 stays: it has the controller"),
        ("remove", "host7", "no host 'host7'; there are host0, host1"),
        ("add", "10.0.0.2:17000", "is host1 already"),
    ],
)
async def test_what_cannot_be_done_changes_nothing(runs: Runs, verb: str, name: str, error: str) -> None:
    config = two_hosts(least_generators=2, device="cuda", trusted_network=True)
    run, control = await commanded(runs, config, *CUDA)
    before = there(run)
    with pytest.raises(ConfigError, match=error):
        await control.do(verb, [name])
    assert there(run) == before and not run.meshes.table.leaving


async def test_a_run_that_listens_to_no_network_takes_no_host(runs: Runs) -> None:
    run = await runs.up(one_host())
    with pytest.raises(ConfigError, match=r"start it with --placement\.address"):
        await run.hosts.do("add", ["10.0.0.2:1"])


async def test_a_lost_host_is_taken_back_under_its_name(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "REJOIN_SECONDS", 0.0)
    run, _ = await commanded(runs, two_hosts(), *CPU)
    attach, tries = run.processes.attach, []

    async def refuse_twice(*hosts: Any, **options: Any) -> Any:
        tries.append(hosts)
        if len(tries) < 3:
            raise HostLost("nobody answers")
        return await attach(*hosts, **options)

    monkeypatch.setattr(run.processes, "attach", refuse_twice)
    run.lose("host1")
    run.hosts.lost(SimpleNamespace(name="host1", lost="host1 is lost"))
    await run.until("host1 (10.0.0.2:17000) is back")
    await asyncio.wait_for(run.meshes.until(lambda: all(mesh.is_up for mesh in run.meshes.table.placed)), 5)
    assert len(tries) == 3 and "relay1" in there(run)["host1"]


async def test_a_host_that_cannot_be_taken_back_for_any_reason_is_tried_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "REJOIN_SECONDS", 0.0)
    run, _ = await commanded(runs, two_hosts(), *CPU)
    attach, errors = run.processes.attach, [RuntimeError("Monarch: channel closed"), KeyError("host1")]

    async def fail_twice(*hosts: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return await attach(*hosts, **options)

    monkeypatch.setattr(run.processes, "attach", fail_twice)
    run.lose("host1")
    run.hosts.lost(SimpleNamespace(name="host1", lost="host1 is lost"))
    await run.until("host1 (10.0.0.2:17000) is back")
    while run.hosts._awaited:
        await asyncio.sleep(0)
    assert run.run_end.settle() is None


async def test_where_a_host_that_joins_is_lost_at_once_the_others_get_their_generators(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, control = await commanded(runs, one_host(trusted_network=True))
    start_missing = run.meshes.start_missing

    async def lose_the_first() -> None:
        if "host1" in run.processes.hosts:
            run.lose("host1")
            run.hosts.lost(SimpleNamespace(name="host1", lost="host1 is lost"))
        await start_missing()

    monkeypatch.setattr(run.meshes, "start_missing", lose_the_first)
    said = await control.do("add", ["10.0.0.2:17000", "10.0.0.3:17000"])
    assert said[0] == "host1 (10.0.0.2:17000) has joined, and is lost again"
    assert said[1] == "host2 (10.0.0.3:17000) has joined" and "generator2 is up on host2" in said[2]
    assert there(run)["host2"] == ["relay2", "generator2"] and len(said) == 3


async def test_a_relay_that_is_still_being_stopped_when_its_host_is_taken_back_starts_there_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "REJOIN_SECONDS", 0.0)
    run, _ = await commanded(runs, two_hosts(), *CPU)
    stop, stopped = run.processes.stop, asyncio.Event()

    async def late(name: str, **options: Any) -> None:
        if name == "relay1":
            await stopped.wait()
        await stop(name, **options)

    monkeypatch.setattr(run.processes, "stop", late)
    run.lose("host1")
    await run.until_back("rollout0")
    assert not run.meshes.meshes["relay1"].wanted
    run.hosts.lost(SimpleNamespace(name="host1", lost="host1 is lost"))
    await run.until("host1 (10.0.0.2:17000) is back")
    stopped.set()
    await run.until_back("relay1")
    assert "relay1" in there(run)["host1"] and list(run.clients["relay0"].peers["relays"]) == ["host0", "host1"]


async def test_a_host_that_is_lost_again_and_again_is_awaited_by_one_task(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await runs.up(two_hosts(), *CPU)
    monkeypatch.setattr(elastic, "REJOIN_SECONDS", 0.0)
    run.hosts.workers["host1"] = "10.0.0.2:17000"
    tries: list[str] = []

    async def join(workers: dict[str, str]) -> None:
        tries.extend(workers)
        await asyncio.Event().wait()

    monkeypatch.setattr(run.hosts, "_join", join)
    for _ in range(3):
        run.hosts.lost(SimpleNamespace(name="host1", lost="host1 is lost"))
    run.lose("host1")
    await run.until_back("rollout0")
    assert tries == ["host1"]


async def test_a_lost_host_that_is_removed_is_not_taken_back(runs: Runs) -> None:
    run, control = await commanded(runs, two_hosts(), *CPU)
    run.lose("host1")
    await control.do("remove", ["host1"])
    assert run.hosts.workers == {}


async def test_a_name_is_never_given_to_two_hosts(runs: Runs) -> None:
    run, control = await commanded(runs, one_host(trusted_network=True))
    await control.do("add", ["10.0.0.2:1", "10.0.0.3:1"])
    await control.do("remove", ["host1"])
    await control.do("add", ["10.0.0.4:1"])
    assert run.hosts.workers == {"host2": "10.0.0.3:1", "host3": "10.0.0.4:1"}


async def test_what_had_no_room_comes_before_what_is_new(runs: Runs) -> None:
    run, control = await commanded(runs, two_hosts(restarts=0, device="cuda", trusted_network=True), *CUDA)
    run.processes.devices = (0, 1)
    gone = run.generator_on("host1")
    run.lose("host1")
    await run.until("is left out")
    await control.do("add", ["10.0.0.5:1"])
    assert run.meshes.meshes[gone].is_up and gone in there(run)["host2"]


async def test_commands_come_through_the_run_directory(runs: Runs, tmp_path: Path) -> None:
    run = await runs.up(one_host())
    link = tmp_path / "control"
    link.symlink_to("/nowhere")
    async with controlled(run.hosts, link, print):
        shown = (await asyncio.to_thread(ask, tmp_path, {"verb": "show", "names": []}))["lines"]
        assert shown[0].startswith("host0: 2 CPUs") and any("generator1" in line for line in shown)
        refused = await asyncio.to_thread(ask, tmp_path, {"verb": "remove", "names": ["host9"]})
        assert "there is no host 'host9'" in json.dumps(refused)
        assert os.stat(Path(os.readlink(link)).parent).st_mode & 0o077 == 0, "only this user can connect"
    assert not link.is_symlink()
    with pytest.raises(ConfigError, match="of no run that is up"):
        ask(tmp_path, {"verb": "show", "names": []})
