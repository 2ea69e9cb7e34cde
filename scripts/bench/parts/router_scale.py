"""The router in front of many generators: its CPU and its messages per request, by the number of generators.

The router is the real actor in its own process. The generators are actors that answer at once, many to a process: only
their messages are like those of real ones. Every client waits for its answer before it asks again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import this_host
from parts.fleet import SECONDS, make_request

from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.routing.config import RouterConfig
from titan_rl.rpc.connection import endpoint
from titan_rl.rpc.requests import RequestServer
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion
from titan_rl.weights.manifest import Manifest, Publication

GENERATORS = (1, 8, 64, 256)
CLIENTS = 1024
REQUESTS_EACH = 6
"""Of a round; the first round of each fleet warms it up."""
ROUNDS = 3
PUBLICATIONS = 3

_TICK = os.sysconf("SC_CLK_TCK")


class AnsweringGenerator(RequestServer):
    """Samples one token for every request, in no time."""

    def __init__(self) -> None:
        super().__init__()
        self._version = PolicyVersion(0, 0)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.answer(
            [
                Completion(
                    request_id=request.request_id,
                    token_ids=np.zeros(1, np.int32),
                    logprobs=np.zeros(1, np.float32),
                    versions=np.full(1, self._version.encode(), np.int64),
                    finish_reason=FinishReason.LENGTH,
                )
                for request in requests
            ]
        )

    def stop_requests(self, request_ids: Sequence[str]) -> None:
        """Nothing runs for longer than a call."""

    @endpoint
    async def pull_model_state_dict(self, publication: Publication) -> PolicyVersion:
        self._version = publication.version
        return publication.version


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def _publication(step: int) -> Publication:
    manifest = Manifest(entries=(), nbytes=0)
    return Publication(channel="policy", version=PolicyVersion(0, step), manifest=manifest, location="nowhere")


async def measure_scale() -> tuple[list[list[Any]], dict[str, Any]]:
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # of the processes that import this module
    router_mesh = this_host().spawn_procs(per_host={"gpus": 1}, name="scale_router")
    generators = this_host().spawn_procs(per_host={"gpus": 1}, name="scale_generators")
    ids = itertools.count()
    for count in GENERATORS:
        handles = {f"g{i}": generators.spawn(f"g{count}x{i}", AnsweringGenerator) for i in range(count)}
        actor = router_mesh.spawn(f"router{count}", GeneratorRouter, RouterConfig(), handles, None)
        router = RouterClient(actor, seconds=SECONDS)
        (pid,) = await router.setup()

        async def one(router: RouterClient) -> None:
            for _ in range(REQUESTS_EACH):
                await router.generate(make_request(f"r{next(ids)}", new_tokens=1, seed=(0,)))

        await router.pull_model_state_dict(_publication(0))
        spent: list[float] = []
        for _ in range(ROUNDS + 1):
            before = _cpu_seconds(pid)
            await asyncio.gather(*(one(router) for _ in range(CLIENTS)))
            spent.append((_cpu_seconds(pid) - before) / CLIENTS / REQUESTS_EACH * 1e6)
        before, started = _cpu_seconds(pid), time.perf_counter()
        for step in range(1, PUBLICATIONS + 1):
            await router.pull_model_state_dict(_publication(step))
        pull = (_cpu_seconds(pid) - before) / PUBLICATIONS * 1e3
        wall = (time.perf_counter() - started) / PUBLICATIONS * 1e3
        each = sorted(spent[1:])[ROUNDS // 2]
        rows.append([str(count), f"{CLIENTS / count:.0f}", f"{each:.0f}", f"{pull:.1f}", f"{pull / count:.2f}", wall])
        figures |= {
            f"router_us_per_request_{count}": round(each, 1),
            f"router_ms_per_publication_{count}": round(pull, 2),
        }
        await router.close()
    await asyncio.gather(router_mesh.stop(), generators.stop())
    return rows, figures
