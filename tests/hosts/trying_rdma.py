"""Program of test_rdma.py: attaches a worker, tries RDMA as if both hosts had it, and prints what came of it; then
whether a process on each host leaves RDMA alone. The second argument: reads fail."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

from titan_rl.config import PlacementConfig
from titan_rl.processes import run_and_exit
from titan_rl.supervision.process import prepare_controller

sys.path.append(str(Path(__file__).parents[1]))  # of `support`


async def attach(worker: str, fails: str = "") -> None:
    from monarch.actor import Actor, endpoint
    from monarch.config import get_global_config
    from monarch.rdma import RDMABuffer
    from support.meshes import mesh_plan

    from titan_rl.hosts import host
    from titan_rl.rpc.connection import bounded
    from titan_rl.supervision.provisioner import Provisioner, listen_for

    class Asked(Actor):
        @endpoint
        async def uses_tcp_only(self) -> bool:
            return bool(get_global_config()["rdma_disable_ibverbs"])

    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("IBV_WC_REM_ACCESS_ERR\nand more")

    host.is_ibverbs_available = lambda: True
    if fails:
        RDMABuffer.read_into = refuse
    hosts = Provisioner(
        log_directory="", imports=(), on_fault=print, listens=listen_for(PlacementConfig(hosts=(worker,)))
    )
    try:
        await hosts.attach({"host1": worker}, silent_seconds=20)
        said: list[str] = []
        await hosts.hosts["host1"].try_rdma(said.append)
        there = []
        for name in hosts.hosts:
            plan = dataclasses.replace(mesh_plan(f"on_{name}", beside=__file__), hosts=(name,))
            (actor,) = hosts.spawn(plan).spawn("asked", Asked)
            there.append(await bounded(actor.uses_tcp_only.call_one(), what="asked", seconds=60))
        print("said", there, *said, flush=True)
    finally:
        await hosts.stop_all()


def main() -> None:
    prepare_controller()
    asyncio.run(attach(*sys.argv[1:]))


if __name__ == "__main__":
    run_and_exit(main)
