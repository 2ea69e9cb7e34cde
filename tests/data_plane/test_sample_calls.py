"""Samples by calls, out of stores in other processes (10 s)."""

from __future__ import annotations

import os
import signal
from typing import Any

from sample_actors import Fetcher, Keeper
from sample_examples import all_bits, group_of, sample_of
from support.meshes import mesh_plan

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.rpc.connection import bounded
from titan_rl.supervision.provisioner import Provisioner
from titan_rl.weights.segment_files import remove_segments_of

SECONDS = 100.0
FAR = [sample_of(1, group_id=1), *group_of(3, 50, group_id=2), sample_of(70_000, group_id=3)]
OTHER = group_of(4, 300, group_id=4)


async def ask(actor: Any, endpoint: str, *args: Any) -> Any:
    return await bounded(getattr(actor, endpoint).call_one(*args), what=endpoint, seconds=SECONDS)


async def test_samples_come_bit_for_bit_or_their_group_is_named() -> None:
    """Everything in one life of four processes, the death of a keeper last."""
    provisioner = Provisioner(log_directory="", imports=(), on_fault=lambda fault: None)
    try:
        keepers = {
            name: provisioner.spawn(mesh_plan(name, beside=__file__)).spawn(name, Keeper, name, os.getpid())[0]
            for name in ("far", "other")
        }
        fetcher = provisioner.spawn(mesh_plan("fetcher", beside=__file__)).spawn("fetcher", Fetcher)[0]
        await ask(fetcher, "attach", keepers)
        stored = {"far": FAR, "other": OTHER}
        refs = {name: await ask(keepers[name], "put", SampleBatch.of(samples)) for name, samples in stored.items()}

        order = [8, 0, 4, 5, 2, 4, 1, 7, 3, 6]  # stores take turns, one sample comes twice
        mixed = SampleBatch.concat(refs.values()).select(order)
        expected = all_bits([[*FAR, *OTHER][index] for index in order])
        assert await ask(fetcher, "bits", mixed) == expected
        assert await ask(fetcher, "bits", mixed.select([])) == []

        await ask(keepers["far"], "damage", refs["far"].select([2]), -1)
        group_id, sample, message = await ask(fetcher, "error", refs["far"])
        assert (group_id, sample) == (2, 1) and "checksum" in message
        assert await ask(fetcher, "bits", refs["far"].select([0, 1, 3, 4])) == all_bits([FAR[i] for i in (0, 1, 3, 4)])
        await ask(keepers["other"], "release", refs["other"].select([1]))
        group_id, _, message = await ask(fetcher, "error", refs["other"].select([1, 0]))
        assert group_id == 4 and "store other could not be read" in message and "released before" in message
        assert await ask(fetcher, "bits", refs["other"].select([0, 2, 3])) == all_bits([OTHER[i] for i in (0, 2, 3)])

        os.kill(await ask(keepers["far"], "pid"), signal.SIGKILL)
        group_id, sample, message = await ask(fetcher, "error", refs["far"].select([4]))
        assert (group_id, sample) == (3, 0) and "store far could not be read" in message
        assert await ask(fetcher, "bits", refs["other"].select([0])) == all_bits(OTHER[:1])
        await ask(keepers["other"], "close")
    finally:
        await provisioner.stop_all()
        remove_segments_of(os.getpid())
