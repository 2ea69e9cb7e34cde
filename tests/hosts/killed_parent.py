"""Program of test_killed_parent.py, on the trainer's host: relays of four hosts, of which one dies as a parent.

    killed_parent.py ADDRESS …     the first one is this host's; the others run Monarch's worker

Says "half" when the child has half of the publication, then waits for a line, and prints what became of the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from monarch.actor import attach_to_workers, enable_transport, this_host
from parts.fanout_node import Node

from titan_rl.actors.connection import Connection
from titan_rl.actors.relay import WeightRelay

PORT = 17_000
SECONDS = 100.0
NBYTES = 8 << 20
HOSTS = ["trainer", "a", "b", "c"]
"""a takes even chunks from b and odd ones from c; b and c take them from the trainer's host and from each other."""


async def main() -> None:
    addresses = sys.argv[1:]
    enable_transport(f"tcp://{addresses[0]}:0")
    places = [
        this_host(),
        *(attach_to_workers(ca="trust_all_connections", workers=[f"tcp://{each}:{PORT}"]) for each in addresses[1:]),
    ]
    relays: dict[str, Any] = {}
    for name, place in zip(HOSTS, places, strict=True):
        relays[name] = place.spawn_procs(per_host={"ranks": 1}, name=name).spawn(name, Node, name).slice(ranks=0)
    calls = {name: Connection(relay, what=f"{{}} on {name}") for name, relay in relays.items()}
    handles = {name: (0, relay) for name, relay in relays.items()}
    for name in HOSTS:
        await calls[name].call(SECONDS, WeightRelay.use, handles)
    publication = await calls["trainer"].call(SECONDS, Node.publish, "policy", 1, NBYTES)
    token, chunks = await calls["a"].call(SECONDS, WeightRelay.open, publication)
    await calls["a"].call(SECONDS, WeightRelay.arrived, token, len(chunks) // 2)
    print("half", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for name in ("trainer", "a", "c"):  # as the controller does when it hears of it
        left = {host: handle for host, handle in handles.items() if host != "b"}
        await calls[name].call(SECONDS, WeightRelay.use, left)
    await asyncio.gather(*(calls[name].call(SECONDS, WeightRelay.bring, publication) for name in "ac"))
    whole = [await calls[name].call(SECONDS, Node.has, publication) for name in "ac"]
    print(json.dumps(whole), flush=True)
    os._exit(0)


asyncio.run(main())
