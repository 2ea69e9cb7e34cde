"""Samples through Monarch (TCP on a machine without RDMA), out of stores in other processes (10 s)."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from sample_actors import Fetcher, Keeper
from sample_examples import bits, group_of, sample_of
from support.meshes import mesh_plan

from titan_rl.actors.connection import bounded
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.launch.provisioner import Provisioner
from titan_rl.types import TrainingSample
from titan_rl.weights.segment_files import remove_segments_of

SECONDS = 100.0
FAR = [sample_of(1, group_id=1), *group_of(3, 50, group_id=2), sample_of(70_000, group_id=3)]
OTHER = group_of(4, 300, group_id=4)


async def ask(actor: Any, endpoint: str, *args: Any) -> Any:
    return await bounded(getattr(actor, endpoint).call_one(*args), what=endpoint, seconds=SECONDS)


async def scenario() -> dict[str, Any]:
    """Everything in one life of four processes, the death of a keeper last."""
    provisioner = Provisioner(log_directory="", imports=(), on_fault=lambda fault: None)
    seen: dict[str, Any] = {}
    try:
        keepers = {
            name: provisioner.spawn(mesh_plan(name, beside=__file__)).spawn(name, Keeper, name, os.getpid())[0]
            for name in ("far", "other")
        }
        fetcher = provisioner.spawn(mesh_plan("fetcher", beside=__file__)).spawn("fetcher", Fetcher)[0]
        await ask(fetcher, "attach", keepers)
        stored = {"far": FAR, "other": OTHER}
        refs = {name: await ask(keepers[name], "put", SampleBatch.of(samples)) for name, samples in stored.items()}

        mixed = SampleBatch.concat(refs.values()).select(mixed_order())
        seen["mixed"] = await ask(fetcher, "bits", mixed)
        seen["parts"] = await ask(
            fetcher, "bits_of_parts", [mixed.select(range(*ends)) for ends in ((0, 4), (4, 4), (4, len(mixed)))]
        )
        seen["nothing"] = await ask(fetcher, "bits", mixed.select([]))

        await ask(keepers["far"], "damage", refs["far"].select([2]), -1)
        seen["damaged"] = await ask(fetcher, "error", refs["far"])
        seen["beside the damaged"] = await ask(fetcher, "bits", refs["far"].select([0, 1, 3, 4]))
        await ask(keepers["other"], "release", refs["other"].select([1]))
        seen["released"] = await ask(fetcher, "error", refs["other"].select([1, 0]))
        seen["beside the released"] = await ask(fetcher, "bits", refs["other"].select([0, 2, 3]))
        seen["exposed"] = [await ask(keepers[name], "exposed") for name in ("far", "other")]

        await ask(keepers["other"], "lose_reader", refs["other"].select([0, 2]))
        await ask(fetcher, "bits", refs["other"].select([0]))
        async with asyncio.timeout(60):  # the fetcher does not wait until its own is withdrawn
            while exposed := await ask(keepers["other"], "exposed"):
                pass
        seen["exposed after the loss of a reader"] = exposed

        os.kill(await ask(keepers["far"], "pid"), signal.SIGKILL)
        seen["killed"] = await ask(fetcher, "error", refs["far"].select([4]))
        seen["after it"] = await ask(fetcher, "bits", refs["other"].select([0]))
        await ask(keepers["other"], "close")
    finally:
        await provisioner.stop_all()
        remove_segments_of(os.getpid())
    return seen


def mixed_order() -> list[int]:
    """Of all samples one after the other: stores take turns, one sample comes twice."""
    return [8, 0, 4, 5, 2, 4, 1, 7, 3, 6]


def all_bits(samples: list[TrainingSample]) -> list[tuple[object, ...]]:
    return [bits(sample) for sample in samples]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return asyncio.run(scenario())


def test_samples_of_several_stores_come_bit_for_bit_in_their_order(seen: dict[str, Any]) -> None:
    everything = [*FAR, *OTHER]
    assert seen["mixed"] == all_bits([everything[index] for index in mixed_order()])
    assert seen["nothing"] == []


def test_fetching_ahead_gives_the_same(seen: dict[str, Any]) -> None:
    first, none, rest = seen["parts"]
    assert none == []
    assert first + rest == seen["mixed"]


def test_a_damaged_sample_is_named_and_costs_no_other(seen: dict[str, Any]) -> None:
    group_id, sample, message = seen["damaged"]
    assert (group_id, sample) == (2, 1)
    assert "checksum" in message
    assert seen["beside the damaged"] == all_bits([FAR[index] for index in (0, 1, 3, 4)])


def test_a_sample_that_was_released_is_named_with_its_store(seen: dict[str, Any]) -> None:
    group_id, _, message = seen["released"]
    assert group_id == 4
    assert "store other could not be read" in message and "released before" in message
    assert seen["beside the released"] == all_bits([OTHER[index] for index in (0, 2, 3)])


def test_a_store_whose_process_died_is_an_error_that_names_the_group(seen: dict[str, Any]) -> None:
    group_id, sample, message = seen["killed"]
    assert (group_id, sample) == (3, 0)
    assert "store far could not be read" in message
    assert seen["after it"] == all_bits(OTHER[:1])


def test_nothing_stays_exposed_after_a_fetch_however_it_ended(seen: dict[str, Any]) -> None:
    assert seen["exposed"] == [0, 0]


def test_what_a_reader_left_that_died_goes_with_the_next_fetch(seen: dict[str, Any]) -> None:
    assert seen["exposed after the loss of a reader"] == 0
