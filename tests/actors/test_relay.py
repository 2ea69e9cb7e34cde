"""Relays of several hosts, as processes with files of their own on one machine, and a generator that pulls through one
(25 s)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from relay_hosts import SECONDS, TRAINER, RelayHosts
from spied_relay import CHUNKS, SpiedRelay
from support.processes import halt

from titan_rl.actors.generator import Generator, GeneratorClient
from titan_rl.actors.relay import READS, WeightRelay
from titan_rl.actors.router_client import RouterClient
from titan_rl.errors import WeightsError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.processes import OWNER
from titan_rl.types import GenerationRequest, PolicyVersion, SamplingParams
from titan_rl.weights.manifest import Publication

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECEIVERS = ["a", "b", "c", "d", "e"]
PARENT = dict(zip(RECEIVERS, [TRAINER, *RECEIVERS], strict=False))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts() -> AsyncIterator[RelayHosts]:
    """Each test publishes the next version."""
    hosts = RelayHosts()
    try:
        await hosts.start(TRAINER, *RECEIVERS)
        yield hosts
    finally:
        await hosts.stop()


async def test_each_host_gets_one_copy_and_no_link_carries_more(hosts: RelayHosts) -> None:
    publication = hosts.publish(1)
    everybody = [*hosts.relays, *hosts.relays]  # two generators on each host
    await asyncio.gather(*(hosts.bring(host, publication) for host in everybody))
    assert all(hosts.has(host, publication) for host in hosts.relays)
    handed = await hosts.handed()
    assert handed[TRAINER] == CHUNKS and sum(handed.values()) == len(RECEIVERS) * CHUNKS
    assert max(handed.values()) <= CHUNKS
    await hosts.bring("a", publication)
    assert sum((await hosts.handed()).values()) == 0


async def test_chunks_are_handed_on_before_the_rest_has_come(hosts: RelayHosts) -> None:
    publication = hosts.publish(2)
    below = "c"
    await hosts.call(TRAINER, SpiedRelay.hold, 4)
    await hosts.call(below, WeightRelay.open, publication)
    await asyncio.gather(*(hosts.call(below, WeightRelay.arrived, publication.serial, chunk) for chunk in range(4)))
    waiting = asyncio.gather(*(hosts.bring(host, publication) for host in RECEIVERS))
    await hosts.call(TRAINER, SpiedRelay.release)
    await waiting
    assert all(hosts.has(host, publication) for host in RECEIVERS)
    await hosts.handed()


async def test_a_slot_is_recycled_and_what_it_had_before_is_gone(hosts: RelayHosts) -> None:
    third, fourth = hosts.publish(3), hosts.publish(4)
    for publication in (third, fourth):
        await asyncio.gather(*(hosts.bring(host, publication) for host in RECEIVERS))
    inodes = [hosts.inode(host, third) for host in RECEIVERS]
    assert all(hosts.has(host, each) for host in RECEIVERS for each in (third, fourth))
    fifth = hosts.publish(5)
    assert fifth.location == third.location
    await asyncio.gather(*(hosts.bring(host, fifth) for host in RECEIVERS))
    assert [hosts.inode(host, fifth) for host in RECEIVERS] == inodes
    assert all(hosts.has(host, each) for host in RECEIVERS for each in (fourth, fifth))
    with pytest.raises(WeightsError, match="relayed v3 is gone: on b relayed v5 has its place"):
        await hosts.bring("b", third)
    assert hosts.has("b", fifth)
    await hosts.handed()


async def test_a_late_parent_is_left_for_the_trainers_host(hosts: RelayHosts) -> None:
    publication = hosts.publish(7)
    below = "c"
    late = PARENT[below]
    await hosts.call(late, SpiedRelay.hold, 2)
    await hosts.call(below, SpiedRelay.be_patient, 1)
    await hosts.bring(below, publication)
    assert hosts.has(below, publication)
    await hosts.call(late, SpiedRelay.release)
    await hosts.call(below, SpiedRelay.be_patient, 10)
    await asyncio.gather(*(hosts.bring(host, publication) for host in RECEIVERS))


async def test_reads_from_a_parent_end_when_it_has_left(hosts: RelayHosts) -> None:
    await hosts.handed()
    publication = hosts.publish(8)
    below = "c"
    leaves = PARENT[below]
    await hosts.call(leaves, SpiedRelay.freeze, True)
    await hosts.call(below, SpiedRelay.be_patient, 1000)
    brought, reads = asyncio.create_task(hosts.bring(below, publication)), 0
    while reads < READS:
        reads += await hosts.call(leaves, SpiedRelay.handed)
    others = {host: handle for host, handle in hosts.handles().items() if host != leaves}
    await hosts.relays[below].set_peers(relays=others)
    await brought
    assert hosts.has(below, publication)
    await hosts.call(leaves, SpiedRelay.freeze, False)
    await hosts.tell()


async def test_a_parent_that_dies_costs_its_children_no_chunk_that_they_have(hosts: RelayHosts) -> None:
    await hosts.handed()
    publication = hosts.publish(9)
    below = "c"
    dying = PARENT[below]
    living = [host for host in RECEIVERS if host != dying]
    await asyncio.gather(*(hosts.call(host, SpiedRelay.be_patient, 60) for host in living))
    await hosts.call(TRAINER, SpiedRelay.hold, CHUNKS // 2)
    await hosts.call(below, WeightRelay.open, publication)
    await hosts.call(below, WeightRelay.arrived, publication.serial, CHUNKS // 2 - 2)
    os.kill(hosts.pids[dying], signal.SIGKILL)
    hosts.relays[dying].lose("it was killed")
    brought = asyncio.gather(*(hosts.bring(host, publication) for host in living))
    await hosts.call(TRAINER, SpiedRelay.release)
    await brought
    assert all(hosts.has(host, publication) for host in living)

    # The relay after it brings the publication again, one copy, under the name that generators read.
    await hosts.replace(dying)
    await hosts.handed()
    await hosts.bring(dying, publication)
    assert hosts.has(dying, publication)
    assert sum((await hosts.handed()).values()) == CHUNKS


async def test_a_host_that_joins_late_takes_one_copy(hosts: RelayHosts) -> None:
    publication = hosts.publish(10)
    await asyncio.gather(*(hosts.bring(host, publication) for host in RECEIVERS))
    await hosts.handed()
    await hosts.start("late")
    await hosts.bring("late", publication)
    assert hosts.has("late", publication)
    assert sum((await hosts.handed()).values()) == CHUNKS


async def test_weights_come_from_the_host_where_they_were_made_also_after_the_trainer_has_moved(
    hosts: RelayHosts,
) -> None:
    before, others = hosts.publish(11), ["b", "c", "d", "e", "late"]
    await asyncio.gather(*(hosts.bring(host, before) for host in ("a", "b")))
    hosts.move_trainer("a")  # where the relay has brought weights into the slots that the trainer now writes
    after = [hosts.publish(12), hosts.publish(13)]
    await hosts.handed()
    await asyncio.gather(*(hosts.bring(host, each) for each in after for host in (TRAINER, *others)))
    assert all(hosts.has(host, each) for each in after for host in hosts.relays)
    assert (await hosts.handed())["a"] == 2 * CHUNKS
    hosts.move_trainer(TRAINER)


async def test_behind_a_stopped_parent_the_weights_come_from_the_trainers_host(hosts: RelayHosts) -> None:
    """It never opens the publication, and the link is one over which all of it may take hours."""
    publication, stopped, behind = hosts.publish(14), "b", ["c", "d", "e"]
    for host in behind:
        await hosts.call(host, SpiedRelay.be_patient, 1, 1 << 10)
    halt(hosts.pids[stopped])
    try:
        await asyncio.gather(*(hosts.bring(host, publication) for host in behind))
    finally:
        os.kill(hosts.pids[stopped], signal.SIGCONT)
    assert all(hosts.has(host, publication) for host in behind)
    for host in behind:
        await hosts.call(host, SpiedRelay.be_patient, 10)
    await hosts.bring(stopped, publication)
    assert hosts.has(stopped, publication)


async def test_a_publication_whose_hosts_have_left_is_named(hosts: RelayHosts) -> None:
    gone = dataclasses.replace(hosts.publish(15), hosts=("left",))
    with pytest.raises(WeightsError, match="relayed v15 is on no host that is left"):
        await hosts.bring("d", gone)


async def test_a_publication_that_is_nowhere_is_an_error_that_says_who_was_asked(hosts: RelayHosts) -> None:
    publication = hosts.publish(16)
    with hosts.on(TRAINER):
        hosts._publisher.close()
    gone = r"relayed v16 did not come to c: .*trainer: WeightsError: relayed v16 is gone: there is no "
    with pytest.raises(WeightsError, match=gone):
        await hosts.bring("c", publication)


class FarGenerator(Generator):
    def __init__(self, owner: int, *args: Any, **options: Any) -> None:
        os.environ[OWNER] = str(owner)
        super().__init__(*args, **options)


class Far:
    """The generator, which needs no model, and its host's relay."""

    def __init__(self, hosts: RelayHosts, model: Path) -> None:
        self.hosts = hosts
        config = GeneratorConfig(count=1, engine="simulated", max_model_len=64)
        (model / "config.json").write_text('{"vocab_size": 13}')
        mesh = hosts.spawn("far", "generator", FarGenerator, "generator", config, model_path=str(model), device="cpu")
        self.mesh = GeneratorClient("generator", mesh, start_seconds=SECONDS)
        self.client = RouterClient(self.mesh.actor, seconds=SECONDS, name="generator")

    async def pull(self, publication: Publication) -> PolicyVersion:
        version: PolicyVersion = await self.mesh.ranks[0].call(SECONDS, Generator.pull_model_state_dict, publication)
        return version

    async def serves(self) -> int:
        """The step of the version that a request is served with."""
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=np.array([2, 3], np.int32),
            sampling=SamplingParams(max_new_tokens=4),
            seed=1,
        )
        return PolicyVersion.decode(int((await self.client.generate(request)).versions[-1])).step


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far(hosts: RelayHosts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Far]:
    hosts.move_trainer(TRAINER)
    await hosts.start("far")
    far = Far(hosts, tmp_path_factory.mktemp("model"))
    await far.mesh.setup(relay=hosts.relays["far"].actor)
    yield far
    await far.client.disconnect()


async def test_its_engine_goes_on_while_the_weights_come(far: Far) -> None:
    assert (await far.pull(far.hosts.publish(21))).step == await far.serves() == 21
    await far.hosts.call(TRAINER, SpiedRelay.hold, 3)
    pull = asyncio.create_task(far.pull(far.hosts.publish(22)))
    await far.hosts.call(TRAINER, SpiedRelay.holds)
    assert await far.serves() == 21
    await far.hosts.call(TRAINER, SpiedRelay.release)
    assert (await pull).step == await far.serves() == 22


async def test_after_a_copy_that_it_refuses_it_serves_the_next_version(far: Far) -> None:
    publication = far.hosts.publish(23)
    await far.hosts.bring("far", publication)
    far.hosts.damage("far", publication)
    with pytest.raises(WeightsError, match="t is not what was published"):
        await far.pull(publication)
    next_one = far.hosts.publish(24)
    assert (await far.pull(next_one)).step == await far.serves() == 24


async def test_a_pull_goes_on_with_the_relay_that_takes_the_place_of_a_dead_one(far: Far) -> None:
    publication = far.hosts.publish(25)
    await far.hosts.call(TRAINER, SpiedRelay.hold, 3)
    pull = asyncio.create_task(far.pull(publication))
    await far.hosts.call(TRAINER, SpiedRelay.holds)
    os.kill(far.hosts.pids["far"], signal.SIGKILL)
    far.hosts.relays["far"].lose("it was killed")
    await far.hosts.call(TRAINER, SpiedRelay.release)
    await far.hosts.replace("far")
    await far.mesh.set_peers(relay=far.hosts.relays["far"].actor)
    assert (await pull).step == await far.serves() == 25
