"""RDMA (TCP on a machine without it) between real Monarch processes: two writers and two readers (15 s)."""

import asyncio
from typing import Any

import pytest
from rdma_actors import LateReader, Reader, Writer
from support.meshes import mesh_plan

from titan_rl.actors.connection import bounded
from titan_rl.errors import ActorFailed
from titan_rl.launch.provisioner import Provisioner

SECONDS = 100.0


async def scenario() -> dict[str, Any]:
    """Everything in one life of three meshes, the death of a writer last."""
    faults: list[ActorFailed] = []
    provisioner = Provisioner(log_directory="", imports=(), on_fault=faults.append)
    seen: dict[str, Any] = {}
    try:
        writers = provisioner.spawn(mesh_plan("writers", 2, beside=__file__)).spawn("writers", Writer)
        reader = provisioner.spawn(mesh_plan("reader", 1, beside=__file__)).spawn("reader", Reader)
        late = provisioner.spawn(mesh_plan("late", 1, beside=__file__)).spawn("late", LateReader)
        await bounded(writers.join.call(), what="join", seconds=SECONDS)
        pairs = await bounded(writers.pairs.call(), what="pairs", seconds=SECONDS)
        seen["pairs"] = [result for _, result in pairs.items()]

        publications = await bounded(writers.publish_first.call(), what="publish", seconds=SECONDS)
        first, of_rank1 = (publication for _, publication in publications.items())
        assert first == of_rank1
        seen["before"] = await bounded(reader.pull.call_one(first, 1), what="pull", seconds=SECONDS)
        seen["survivor"], seen["killed"] = await asyncio.gather(
            *(
                bounded(writers.slice(ranks=rank).die_publishing.call_one(), what="publish", seconds=SECONDS)
                for rank in range(2)
            ),
            return_exceptions=True,
        )
        seen["held"] = await bounded(reader.pull.call_one(first, 1), what="pull", seconds=SECONDS)
        seen["late"] = await bounded(late.error.call_one(first), what="late", seconds=SECONDS)
        seen["faults"] = [str(fault) for fault in faults]
    finally:
        await provisioner.stop_all()
    return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return asyncio.run(scenario())


@pytest.mark.parametrize("writers", ["FSDP 2", "TP 2", "1"])
@pytest.mark.parametrize("readers", ["TP 2", "TP 1"])
def test_any_parallelism_reads_the_bytes_of_any_other(seen: dict[str, Any], writers: str, readers: str) -> None:
    assert [result[f"{writers} → {readers}"] for result in seen["pairs"]] == [True, True]


def test_a_third_process_reads_and_verifies_what_two_writers_hold(seen: dict[str, Any]) -> None:
    assert seen["before"]


def test_when_a_writer_is_killed_the_half_written_version_never_exists(seen: dict[str, Any]) -> None:
    assert isinstance(seen["killed"], ActorFailed)
    assert isinstance(seen["survivor"], ActorFailed) or "error" in seen["survivor"]


def test_a_reader_that_has_the_version_before_still_reads_it(seen: dict[str, Any]) -> None:
    assert seen["held"]


def test_the_memory_of_a_dead_writer_is_an_error_that_names_the_version(seen: dict[str, Any]) -> None:
    assert "policy v1 could not be fetched from the trainer" in seen["late"]
