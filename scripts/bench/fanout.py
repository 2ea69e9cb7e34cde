"""How long new weights take to many hosts over links of a stated speed.

    sudo python scripts/bench/fanout.py [--hosts 16] [--mib 64] [--mbit 16]

The hosts are network namespaces of this machine (`tests/hosts/namespaces.py`), each with a link that carries `--mbit`
in each direction and an address, a /dev/shm and a relay of its own. What is measured is `WeightRelay.bring` on all of
them at once, as their generators call it. Three ways:

- direct: four generators on each of four hosts read from the trainer's host, each for itself;
- relay: each host reads from the trainer's host once;
- chain: the product's way.

A link's bound is the time of one copy over one link. `trainer_egress_copies`: bytes that left the trainer's host, all
headers included, by those of the publication; `most_egress_copies`: the same of the host that sent most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from parts.table import print_report  # noqa: E402

if TYPE_CHECKING:
    from titan_rl.weights.manifest import Publication

PORT = 17_000
TRAINER = "host1"
BOUND_SECONDS = 600.0

_WORKER = "import sys; from monarch.actor import run_worker_loop_forever as run; run(address=sys.argv[1], ca={!r})"
_TRUST = "trust_all_connections"


async def drive(addresses: Sequence[str], mib: int, mbit: int) -> dict[str, Any]:
    """On the trainer's host: start the relays and measure."""
    from monarch.actor import attach_to_workers, enable_transport, this_host
    from parts.fanout_node import Node

    enable_transport(f"tcp://{addresses[0]}:0")
    places = [this_host(), *(attach_to_workers(ca=_TRUST, workers=[f"tcp://{each}:{PORT}"]) for each in addresses[1:])]
    names = [f"host{number}" for number in range(1, len(addresses) + 1)]
    meshes = [place.spawn_procs(per_host={"ranks": 1}, name=name) for place, name in zip(places, names, strict=True)]
    relays = {name: mesh.spawn(name, Node, name).slice(ranks=0) for name, mesh in zip(names, meshes, strict=True)}
    receivers = {name: relay for name, relay in relays.items() if name != TRAINER}
    await _all(relays, "set_up", {name: (0, relay) for name, relay in relays.items()})
    nbytes = mib << 20
    for turn in (1, 2):  # in the first one memory is made and registered, and connections are opened
        publication: Publication = await _call(relays[TRAINER], "publish", turn, nbytes)
        before = await _all(relays, "sent")
        started = time.monotonic()
        await _all(receivers, "fetch", publication)
        took = time.monotonic() - started
        sent = [(after - start) / nbytes for start, after in zip(before, await _all(relays, "sent"), strict=True)]
        assert all(await _all(receivers, "has", publication)), "some host has not what was published"
    await asyncio.gather(*(mesh.stop() for mesh in meshes))
    return {
        "hosts": len(receivers),
        "mib": mib,
        "mbit": mbit,
        "seconds": took,
        "trainer_egress_copies": sent[list(relays).index(TRAINER)],
        "most_egress_copies": max(sent),
        "time_ratio_to_link_bound": took / (nbytes * 8 / mbit / 1e6),
    }


async def _call(node: Any, endpoint: str, *args: Any) -> Any:
    async with asyncio.timeout(BOUND_SECONDS):
        return await getattr(node, endpoint).call_one(*args)


async def _all(nodes: dict[str, Any], endpoint: str, *args: Any) -> list[Any]:
    return await asyncio.gather(*(_call(node, endpoint, *args) for node in nodes.values()))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    from tests.hosts.namespaces import Hosts

    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).resolve().parent)])
    with Hosts(arguments.hosts + 1) as hosts:
        for host in hosts:
            host.limit(arguments.mbit * 1_000_000)
        for host in hosts[1:]:
            command = [sys.executable, "-c", _WORKER.format(_TRUST), f"tcp://{host.address}:{PORT}"]
            host.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        addresses = ",".join(host.address for host in hosts)
        command = [sys.executable, __file__, "--drive", addresses, "--mib", str(arguments.mib)]
        driver = hosts[0].run(
            [*command, "--mbit", str(arguments.mbit)], env=environment, stdout=subprocess.PIPE, text=True
        )
        text = driver.communicate()[0]
        if driver.returncode:
            sys.exit(f"the driver ended with {driver.returncode}")
        return json.loads(text.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=16, help="receivers")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--mbit", type=int, default=16, help="two cores carry no more for 16 hosts")
    parser.add_argument("--drive", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        found = asyncio.run(drive(arguments.drive.split(","), arguments.mib, arguments.mbit))
        print(json.dumps(found), flush=True)
        os._exit(0)
    figures = measured(arguments)
    rows = [(name, value) for name, value in figures.items() if isinstance(value, float)]
    print_report(f"{arguments.hosts} hosts, links of {arguments.mbit} Mbit/s", ("", "measured"), rows, figures)


if __name__ == "__main__":
    main()
