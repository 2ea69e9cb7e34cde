"""Part (b): a step's samples from where they were made to a trainer rank, by reference and through the controller.

Three processes: a store, a rank, and this one as the controller. Each contender begins with samples in the store's
process and ends with decoded samples in the rank's; a plain copy of the same bytes in the rank's process, warm, is the
unit. By reference: the controller gets references and hands them on, the rank fetches. Through the controller: the
samples themselves take that way, as packed arrays in one message each.

Actors of data_plane.py: a store in the process that made its samples, and a trainer rank that wants them.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.actors.connection import ConnectedActor, bounded, served
from titan_rl.actors.sample_stores import AnyHostSource, StoreKeeper
from titan_rl.data_plane.layout import encoded_size
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleSource, SampleStore, SharedMemorySource
from titan_rl.launch.placement import MeshPlan
from titan_rl.launch.provisioner import Provisioner
from titan_rl.types import TrainingSample


class Store(StoreKeeper):
    """A rollout worker without rollouts."""

    def __init__(self, name: str, owner_pid: int) -> None:
        super().__init__(SampleStore(name, owner_pid=owner_pid))

    @served
    async def fill(self, tokens: int, nbytes: int) -> int:
        """Make and store about so many bytes of samples; returns how many it is."""
        count = max(1, nbytes // encoded_size(tokens))
        self._samples = SampleBatch.of(_sample(tokens, number) for number in range(count))
        self._references = SampleBatch.of(self._store.put(self._samples.samples))
        return count * encoded_size(tokens)

    @served
    async def references(self) -> SampleBatch:
        return self._references

    @served
    async def samples(self) -> SampleBatch:
        return self._samples

    @served
    async def empty(self) -> None:
        self._store.release(self._references.stored_ids[self._store.name])

    @served
    async def close(self) -> None:
        self._store.close()


class Rank(ConnectedActor):
    """A trainer rank without a policy."""

    def __init__(self) -> None:
        self._sources: dict[str, SampleSource] = {"shared_memory": SharedMemorySource()}

    @served
    async def attach(self, stores: dict[str, Any]) -> None:
        self._sources["rdma"] = AnyHostSource(stores)

    @served
    async def copy(self, nbytes: int) -> float:
        """Seconds of a plain copy, warm."""
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        started = time.perf_counter()
        target[:] = source
        return time.perf_counter() - started

    @served
    async def take(self, transport: str, batch: SampleBatch) -> float:
        """Have the samples of a batch through a transport; returns the seconds that it took to fetch them."""
        context = contextvars.copy_context()

        def fetch() -> float:
            started = time.perf_counter()
            samples = self._sources[transport].fetch(batch)
            seconds = time.perf_counter() - started
            if len(samples) != len(batch):
                raise RuntimeError(f"{len(samples)} samples came, not {len(batch)}")
            return seconds

        return await asyncio.get_running_loop().run_in_executor(None, lambda: context.run(fetch))


def _sample(tokens: int, number: int) -> TrainingSample:
    random = np.random.default_rng(number)
    mask = np.arange(tokens) > 0
    return TrainingSample(
        group_id=number // 8,
        sample=number % 8,
        token_ids=random.integers(0, 1 << 17, tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=-random.random(tokens, dtype=np.float32) * mask,
        versions=np.where(mask, np.int64(7), np.int64(-1)),
        advantage=0.0,
        reward=0.0,
    )


TOKENS = 4096
"""Of a sample."""
MEGABYTES = (1, 16, 256)
TRANSPORTS = ("shared_memory", "rdma")
LOCAL = "through the controller"
SECONDS = 300.0


async def measure_throughput(repetitions: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows for people (megabytes, contender, ms, GB/s, in plain copies, against the controller's way) and figures."""
    provisioner = Provisioner(log_directory="", imports=(), on_fault=lambda fault: print(fault, flush=True))
    seconds: dict[tuple[int, str], list[float]] = {}
    nbytes: dict[int, int] = {}
    try:
        stores = {
            transport: provisioner.spawn(_plan(f"store_{transport}")).spawn(
                "store", Store, f"bench_{transport}", os.getpid()
            )[0]
            for transport in TRANSPORTS
        }
        rank = provisioner.spawn(_plan("rank")).spawn("rank", Rank)[0]
        await _ask(rank, "attach", {"bench_rdma": stores["rdma"]})
        for megabytes in MEGABYTES:
            for store in stores.values():
                nbytes[megabytes] = await _ask(store, "fill", TOKENS, megabytes << 20)
            for repetition in range(repetitions + 1):  # the first one makes memory, connections and mappings
                times: dict[str, float] = {"copy": await _ask(rank, "copy", nbytes[megabytes])}
                for transport, store in stores.items():
                    with _timed(times, transport):
                        refs = await _ask(store, "references")
                        times[f"{transport} fetch"] = await _ask(rank, "take", transport, refs)
                with _timed(times, LOCAL):
                    samples = await _ask(stores["shared_memory"], "samples")
                    await _ask(rank, "take", "shared_memory", samples)
                del samples
                if repetition:
                    for contender, spent in times.items():
                        seconds.setdefault((megabytes, contender), []).append(spent)
            for store in stores.values():
                await _ask(store, "empty")
            print(f"(b) {megabytes} MB done", flush=True)
        for store in stores.values():
            await _ask(store, "close")
    finally:
        await provisioner.stop_all()
    return _table(seconds, nbytes)


def _table(
    seconds: dict[tuple[int, str], list[float]], nbytes: dict[int, int]
) -> tuple[list[list[Any]], dict[str, Any]]:
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}

    def ratio(megabytes: int, one: str, other: str) -> float:
        pairs = zip(seconds[megabytes, one], seconds[megabytes, other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    for megabytes in MEGABYTES:
        for contender in ("copy", *(f"{t}{part}" for t in TRANSPORTS for part in (" fetch", "")), LOCAL):
            spent = statistics.median(seconds[megabytes, contender])
            copies, gain = ratio(megabytes, contender, "copy"), ratio(megabytes, LOCAL, contender)
            rows.append([f"{megabytes} MB", contender, spent * 1e3, nbytes[megabytes] / spent / 1e9, copies, gain])
            if contender in TRANSPORTS:
                figures |= {
                    f"{contender}_copies_{megabytes}mb": round(ratio(megabytes, f"{contender} fetch", "copy"), 2),
                    f"{contender}_gb_per_s_{megabytes}mb": round(nbytes[megabytes] / spent / 1e9, 3),
                    f"{contender}_to_controller_{megabytes}mb": round(gain, 2),
                }
    return rows, figures


@contextmanager
def _timed(times: dict[str, float], what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times[what] = time.perf_counter() - started


async def _ask(actor: Any, endpoint: str, *args: Any) -> Any:
    return await bounded(getattr(actor, endpoint).call_one(*args), what=endpoint, seconds=SECONDS)


def _plan(name: str) -> MeshPlan:
    here = Path(__file__).resolve().parents[1]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    return MeshPlan(name=name, hosts=("host0",), env=(environment,), devices=(None,), positions=("",))
