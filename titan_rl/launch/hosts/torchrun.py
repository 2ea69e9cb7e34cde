"""One run over the hosts of one torchrun: rank 0 is the controller, every other rank a worker.

    torchrun --nnodes N --nproc-per-node 1 … -m titan_rl.train --recipe NAME --trusted-network

The ranks meet in torchrun's own store, with static and with c10d rendezvous. A worker ends when rank 0 says that it is
over, or when the store is gone, which ends with rank 0's torchrun. Stop signals, which launchers send to all ranks, are
rank 0's business.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from titan_rl.errors import ConfigError
from titan_rl.launch.hosts.facts import address_towards
from titan_rl.launch.hosts.worker import free_port, serve_host

if TYPE_CHECKING:
    from torch.distributed import TCPStore

WORKER, OVER = "titan_rl/{}/worker{}", "titan_rl/{}/over"
"""Keys in the store, which outlives an attempt of torchrun (`--max-restarts`)."""
MEET_SECONDS = 60.0
"""How long rank 0 waits for the workers, and they for the store."""
FOR_EVER = timedelta(days=365)


def hosts_of(environ: Mapping[str, str]) -> int:
    """Over how many hosts torchrun has started this program; 1: it has not, or over one.

    Raises:
        ConfigError: several processes on one host, or the variables are not all there.
    """
    world, here = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "1")
    if not world.isdigit() or int(world) <= 1:
        return 1
    if here != "1":
        raise ConfigError(
            f"torchrun has started {here} processes on this host; titan_rl starts its own: use --nproc-per-node 1"
        )
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]:
        raise ConfigError(
            f"WORLD_SIZE is {world}, as under torchrun, but there is no {', '.join(missing)}: use torchrun, or unset it"
        )
    return int(world)


def workers(environ: Mapping[str, str], ranks: int) -> tuple[str, ...]:
    """On rank 0: ADDRESS:PORT of every other rank, which end when this process does.

    Raises:
        ConfigError: one did not come.
    """
    store, attempt = _store(environ), environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    atexit.register(store.set, OVER.format(attempt), "1")
    found = []
    for rank in range(1, ranks):
        try:
            found.append(store.get(WORKER.format(attempt, rank)).decode())
        except RuntimeError as error:  # torch's DistStoreError
            raise ConfigError(f"rank {rank} of torchrun did not come within {MEET_SECONDS:g} s") from error
    return tuple(found)


def serve_rank(environ: Mapping[str, str], *, trusted: bool) -> NoReturn:
    """On any other rank: be a worker until rank 0 is over. Raises ConfigError."""
    store, attempt = _store(environ), environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    address = address_towards(f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}")
    port = free_port(address)

    def wait() -> None:
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 saves the weights, for which it needs this
            signal.signal(stop, lambda *_: None)
        store.set(WORKER.format(attempt, environ["RANK"]), f"{address}:{port}")
        store.wait([OVER.format(attempt)], FOR_EVER)

    serve_host(address, port, trusted=trusted, until=wait)


def _store(environ: Mapping[str, str]) -> TCPStore:
    """torchrun's; it is there before any rank is started."""
    from torch.distributed import TCPStore

    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=MEET_SECONDS))
    except RuntimeError as error:
        raise ConfigError(f"torchrun's rendezvous at {address}:{port} does not answer: {error}") from error
