"""What samples by reference cost the controller, and how quickly they reach a trainer rank.

    python scripts/bench/data_plane.py [--only bytes throughput] [--repetitions 7]

(a) `controller_bytes_per_sample_<tokens>`: every argument and result that is serialised in the controller's process
during whole steps (groups played, samples trained and released, weights published and pulled), by the tokens
that were sampled for a sample; `router_bytes_per_sample_<tokens>`: the same in the router's process. Generated tokens
go from generators to rollout workers directly, so none are in either number. The engine is a simulated one, which
samples any length at once; 16 and 256 tokens are also sampled by vLLM (`…_vllm`), which changes nothing of the messages
but the numbers that engines report. `controller_bytes_per_sample` is the largest of all, `samples_per_kib` how many
such samples go into 1 KiB. `…_2_ranks`: two trainer ranks, each is told of its own.

(b) Throughput of store → trainer rank at 1, 16 and 256 MB of samples of 4,096 tokens, through shared memory and through
Monarch (RDMA, over TCP where there is none): `<transport>_copies_<size>mb`: time of the rank's fetch, verification
included, in plain warm copies of the same bytes; `<transport>_gb_per_s_<size>mb`: from the question for references to
samples in the rank; `<transport>_to_controller_<size>mb`: how many times as long the same batch takes as a LOCAL one,
through the controller. Medians over repetitions in which all contenders take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import Any

from _data_plane_bytes import measure_bytes
from _data_plane_throughput import measure_throughput
from _table import print_report, print_table

HEADERS: dict[str, tuple[str, Sequence[str]]] = {
    "bytes": (
        "(a) bytes per sample in messages of the controller and of the router",
        ["tokens sampled", "engine", "trainer ranks", "controller", "router"],
    ),
    "throughput": (
        "(b) store → trainer rank",
        ["samples", "way", "ms (median)", "GB/s", "in plain copies", "the controller's way ÷ this"],
    ),
}
SYSTEMS = (
    ("simulated", (16, 256, 4096, 16_000), 1, ""),
    ("vllm", (16, 256), 1, "_vllm"),
    ("simulated", (16,), 2, "_2_ranks"),
)
"""Engine, lengths, trainer ranks, and what their figures end with."""
KIBIBYTE = 1024


async def measure_systems() -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows for people and figures of part (a)."""
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    for engine, lengths, ranks, suffix in SYSTEMS:
        for length, measured in (await measure_bytes(engine, lengths, ranks)).items():
            rows.append([f"{length:,}", engine, ranks, measured.controller, measured.router])
            figures[f"controller_bytes_per_sample_{length}{suffix}"] = round(measured.controller, 1)
            figures[f"router_bytes_per_sample_{length}{suffix}"] = round(measured.router, 1)
    worst = max(value for name, value in figures.items() if name.startswith("controller"))
    return rows, figures | {"controller_bytes_per_sample": worst, "samples_per_kib": round(KIBIBYTE / worst, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(HEADERS), default=list(HEADERS), help="parts to run")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    cpus, busy = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cpus} CPUs; load average before the start {busy:.1f}", flush=True)
    figures: dict[str, Any] = {"cpus": cpus, "load_average_before": round(busy, 2)}
    tables: list[tuple[str, list[list[Any]]]] = []
    for part in options.only:
        work = measure_systems() if part == "bytes" else measure_throughput(options.repetitions)
        rows, found = asyncio.run(work)
        tables.append((part, rows))
        figures |= found
    for part, rows in tables[:-1]:
        print_table(*HEADERS[part], rows)
    last, rows = tables[-1]
    print_report(*HEADERS[last], rows, figures)


if __name__ == "__main__":
    main()
