"""How new weights reach many hosts over links of a stated speed: from the trainer's host, or along a chain.

    sudo python scripts/bench/fanout.py [--hosts 16] [--mib 64] [--mbit 16]

The hosts are network namespaces of this machine (`tests/hosts/namespaces.py`), each with a link that carries `--mbit`
in each direction and an address, a /dev/shm and a relay of its own. What is measured is `WeightRelay.bring` on all of
them at once, as their generators call it. Three ways:

- direct: four generators on each of four hosts read from the trainer's host, each for itself;
- relay: each host reads from the trainer's host once;
- chain: the product's way.

A link's bound is the time of one copy over one link. `*_egress_copies`: bytes that left the trainer's host, all headers
included, by those of the publication. `most_egress_copies`: the same of the host that sent most. Direct and relay get a
publication of a 32nd of the size, because they take so long.
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
DIRECT_HOSTS, GENERATORS = 4, 4
"""Of the direct way."""
BOUND_SECONDS = 600.0

_WORKER = "import sys; from monarch.actor import run_worker_loop_forever as run; run(address=sys.argv[1], ca={!r})"
_TRUST = "trust_all_connections"


async def drive(addresses: Sequence[str], mib: int, mbit: int) -> dict[str, Any]:
    """On the trainer's host: start the relays and measure."""
    from monarch.actor import attach_to_workers, enable_transport, this_host
    from parts.fanout_node import Node

    enable_transport(f"tcp://{addresses[0]}:0")
    places = [this_host(), *(attach_to_workers(ca=_TRUST, workers=[f"tcp://{each}:{PORT}"]) for each in addresses[1:])]
    meshes: list[Any] = []

    def node(host: int, name: str) -> Any:
        mesh = places[host].spawn_procs(per_host={"ranks": 1}, name=name)
        meshes.append(mesh)
        return mesh.spawn(name, Node, name).slice(ranks=0)

    relays = {f"host{number}": node(number - 1, f"host{number}") for number in range(1, len(addresses) + 1)}
    apart = {
        f"generator{host}_{number}": node(host, f"generator{host}_{number}")
        for host in range(1, min(DIRECT_HOSTS, len(addresses) - 1) + 1)
        for number in range(GENERATORS)
    }
    found: dict[str, Any] = {"hosts": len(addresses) - 1, "mib": mib, "mbit": mbit}

    async def measure(way: str, nodes: dict[str, Any], nbytes: int, *, flat: bool) -> None:
        everybody = {TRAINER: relays[TRAINER], **nodes}
        handles = {name: (0, handle) for name, handle in everybody.items()}
        await asyncio.gather(*(_call(each, "set_up", handles, flat) for each in everybody.values()))
        for turn in (1, 2):  # in the first one memory is made and registered, and connections are opened
            publication: Publication = await _call(relays[TRAINER], "publish", way, turn, nbytes)
            before = dict(zip(everybody, await _all(everybody, "sent"), strict=True))
            started = time.monotonic()
            await _all(nodes, "fetch", publication)
            took = time.monotonic() - started
            after = dict(zip(everybody, await _all(everybody, "sent"), strict=True))
            assert all(await _all(nodes, "has", publication)), f"{way}: some host has not what was published"
        copies = {name: (after[name] - before[name]) / nbytes for name in everybody}
        found[f"{way}_egress_copies"], found[f"{way}_seconds"] = copies[TRAINER], took
        found[f"{way}_most_egress_copies"] = max(copies.values())
        found[f"{way}_time_ratio_to_link_bound"] = took / (nbytes * 8 / mbit / 1e6)

    small = mib << 15
    await measure("direct", apart, small, flat=True)
    receivers = {name: handle for name, handle in relays.items() if name != TRAINER}
    await measure("relay", receivers, small, flat=True)
    await measure("chain", receivers, mib << 20, flat=False)
    await asyncio.gather(*(mesh.stop() for mesh in meshes))
    return found


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
    ways = [
        [
            way,
            figures[f"{way}_seconds"],
            figures[f"{way}_time_ratio_to_link_bound"],
            figures[f"{way}_egress_copies"],
            figures[f"{way}_most_egress_copies"],
        ]
        for way in ("direct", "relay", "chain")
    ]
    figures["trainer_egress_copies"] = figures["chain_egress_copies"]
    figures["time_ratio_to_link_bound"] = figures["chain_time_ratio_to_link_bound"]
    header = ["way", "seconds", "in bounds of a link", "copies from the trainer", "most from any"]
    print_report(f"{arguments.hosts} hosts, links of {arguments.mbit} Mbit/s", header, ways, figures)


if __name__ == "__main__":
    main()
