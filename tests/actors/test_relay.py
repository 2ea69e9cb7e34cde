"""Relays of several hosts, as processes with files of their own on one machine (20 s)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from relay_hosts import SECONDS, TRAINER, RelayHosts
from spied_relay import CHUNKS, SpiedRelay

from titan_rl.actors.relay import READS, WeightRelay
from titan_rl.errors import WeightsError
from titan_rl.weights.fanout import parents

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECEIVERS = ["a", "b", "c", "d", "e"]
SCHEDULE = parents([TRAINER], [TRAINER, *RECEIVERS])


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
    assert max(handed.values()) <= CHUNKS + 1
    await hosts.bring("a", publication)
    assert sum((await hosts.handed()).values()) == 0


async def test_chunks_are_handed_on_before_the_rest_has_come(hosts: RelayHosts) -> None:
    publication = hosts.publish(2)
    below = next(host for host in RECEIVERS if TRAINER not in SCHEDULE[host])
    await hosts.call(TRAINER, SpiedRelay.hold, 4)
    token, _ = await hosts.call(below, WeightRelay.open, publication)
    await asyncio.gather(*(hosts.call(below, WeightRelay.arrived, token, chunk) for chunk in range(4)))
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


async def test_what_was_damaged_comes_again_from_the_trainers_host(hosts: RelayHosts) -> None:
    publication = hosts.publish(6)
    await asyncio.gather(*(hosts.bring(host, publication) for host in RECEIVERS))
    await hosts.handed()
    for host in ("a", "b"):
        hosts.damage(host, publication)
    assert not hosts.has("a", publication)
    await asyncio.gather(*(hosts.bring(host, publication, again=True) for host in ("a", "b")))
    assert hosts.has("a", publication) and hosts.has("b", publication)
    assert await hosts.handed() == dict.fromkeys(RECEIVERS, 0) | {TRAINER: 2 * CHUNKS}


async def test_a_late_parent_is_left_for_the_trainers_host(hosts: RelayHosts) -> None:
    publication = hosts.publish(7)
    below = next(host for host in RECEIVERS if TRAINER not in SCHEDULE[host])
    late = SCHEDULE[below][0]
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
    below = next(host for host in RECEIVERS if TRAINER not in SCHEDULE[host])
    leaves = SCHEDULE[below][0]
    await hosts.call(leaves, SpiedRelay.freeze, True)
    await hosts.call(below, SpiedRelay.be_patient, 1000)
    brought, reads = asyncio.create_task(hosts.bring(below, publication)), 0
    while reads < READS:
        reads += await hosts.call(leaves, SpiedRelay.handed)
    others = [relay for host, relay in hosts.relays.items() if host != leaves]
    await hosts.relays[below].setup(others, seconds=SECONDS)
    await brought
    assert hosts.has(below, publication)
    await hosts.call(leaves, SpiedRelay.freeze, False)
    await hosts.tell()


async def test_a_parent_that_dies_costs_its_children_no_chunk_that_they_have(hosts: RelayHosts) -> None:
    await hosts.handed()
    publication = hosts.publish(9)
    below = next(host for host in RECEIVERS if TRAINER not in SCHEDULE[host])
    dying = SCHEDULE[below][0]
    living = [host for host in RECEIVERS if host != dying]
    await asyncio.gather(*(hosts.call(host, SpiedRelay.be_patient, 60) for host in living))
    await hosts.call(TRAINER, SpiedRelay.hold, CHUNKS // 2)
    token, _ = await hosts.call(below, WeightRelay.open, publication)
    await hosts.call(below, WeightRelay.arrived, token, CHUNKS // 2 - 2)
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


async def test_a_publication_whose_hosts_have_left_is_named(hosts: RelayHosts) -> None:
    gone = dataclasses.replace(hosts.publish(14), hosts=("left",))
    with pytest.raises(WeightsError, match="relayed v14 is on no host that is left"):
        await hosts.bring("d", gone)


async def test_a_publication_that_is_nowhere_is_an_error_that_says_who_was_asked(hosts: RelayHosts) -> None:
    publication = hosts.publish(15)
    with hosts.on(TRAINER):
        hosts._publisher.close()
    gone = r"relayed v15 did not come to c: .*trainer: WeightsError: relayed v15 is gone: there is no "
    with pytest.raises(WeightsError, match=gone):
        await hosts.bring("c", publication)
