"""Program of test_locked_worker.py: a controller that attaches a worker, and again at each line `attach`. The second
argument is the directory of logs, if there is one.

Prints `attached PID` of the agent, `lost NAME`, `refused WHY`, and whatever a run would say.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from titan_rl.config import PlacementConfig
from titan_rl.errors import ConfigError
from titan_rl.processes import run_and_exit
from titan_rl.supervision.process import prepare_controller


async def attach(worker: str, logs: str = "") -> None:
    from titan_rl.supervision.provisioner import Provisioner, listen_for

    def say(*what: object) -> None:
        print(*what, flush=True)

    listens = listen_for(PlacementConfig(hosts=(worker,)))
    hosts = Provisioner(log_directory=logs, imports=(), on_fault=say, listens=listens)
    try:
        while True:
            await hosts.attach({"host1": worker}, silent_seconds=5, on_lost=lambda host: say("lost", host.name))
            if logs:
                Path(hosts.hosts["host1"].logs, "host1.log").write_text("news")
            say("attached", hosts.hosts["host1"].owner)
            if await asyncio.to_thread(sys.stdin.readline) != "attach\n":
                return
    except ConfigError as error:
        say("refused", error)
    finally:
        await hosts.stop_all()


def main() -> None:
    prepare_controller()
    asyncio.run(attach(*sys.argv[1:]))


if __name__ == "__main__":
    run_and_exit(main)
