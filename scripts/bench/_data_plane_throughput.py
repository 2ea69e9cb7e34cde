"""Part (b): a step's samples from where they were made to a trainer rank, by reference and through the controller.

Three processes: a store, a rank, and this one as the controller. Each contender begins with samples in the store's
process and ends with decoded samples in the rank's; a plain copy of the same bytes in the rank's process, warm, is the
unit. By reference: the controller gets references and hands them on, the rank fetches. Through the controller: the
samples themselves take that way, as packed arrays in one message each.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _sample_actors import Rank, Store

from titan_rl.actors.connection import bounded
from titan_rl.launch.placement import MeshPlan
from titan_rl.launch.provisioner import Provisioner

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
            transport: provisioner.spawn(_plan(f"store_{transport}"))
            .spawn("store", Store, f"bench_{transport}", os.getpid())
            .slice(ranks=0)
            for transport in TRANSPORTS
        }
        rank = provisioner.spawn(_plan("rank")).spawn("rank", Rank).slice(ranks=0)
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
    here = Path(__file__).resolve().parent
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    return MeshPlan(name=name, env=(environment,), devices=(None,), positions=("",))
