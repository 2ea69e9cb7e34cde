"""Lends this host to runs: `titan-rl worker` to one after the other, a rank of torchrun or of a job to rank 0's.

- Whoever reaches the port can run any code here: trusted networks only, or TLS (`facts.TLS`). A worker listens on the
  address that it is given and on no other. It starts nothing by itself; a run's controller starts an agent, which ends
  with everything that the run has here when it is told to, or does not hear of the controller any more.
- Rank 0 is the controller, every other rank a worker. The ranks meet in torchrun's own store, with static and with c10d
  rendezvous. Without torchrun, as in the jobs of `titan-rl launch`, rank 0 has the store, at MASTER_ADDR. A worker ends
  when rank 0 says that it is over; it fails when the store is gone. Stop signals, which launchers send to all
  processes, are rank 0's business.
- A worker that was killed is started again at another port while its run goes on. At the old one Monarch 0.7 forwards
  what is sent to its dead processes to itself, hop by hop, until it fails the actor that has sent it ("ttl expired"),
  whatever that actor's `_handle_undeliverable_message` says.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from titan_rl.errors import ConfigError
from titan_rl.gateway.config import is_loopback, listen
from titan_rl.hosts.facts import address_towards, transport
from titan_rl.overrides import Command, Verb
from titan_rl.processes import run_and_exit
from titan_rl.supervision.process import prepare_controller, scratch_directory

if TYPE_CHECKING:
    from torch.distributed import Store

WARNING = "whoever reaches this port can run any code here: trusted networks only"

TRUSTED, WORKER, OVER, LEFT = "trusted", "worker{}", "over", "left{}"
"""Keys in the store."""
NODES = "TITAN_RL_NODES"
"""Variable with the names of the nodes in the order of their ranks, for messages; it may be missing."""
MEET_SECONDS = 600.0
"""How long rank 0 waits for the workers, and they for the store: a node may have to fetch an image first."""
LEAVE_SECONDS = 5.0
"""How long a store that is rank 0's own waits for the workers to hear that it is over."""
FOR_EVER = timedelta(days=365)


def serve_host(address: str, port: int, *, trusted: bool, until: Callable[[], object]) -> NoReturn:
    """Lend this host to controllers: listen on this IP address, then call `until`, whose end ends the process. Raises
    ConfigError: nobody may or can listen there. `trusted`: every machine that reaches the address may be trusted."""
    scheme = transport(() if trusted or is_loopback(address) else (address,))
    listen(address, port).close()
    prepare_controller()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TMPDIR"] = str(scratch_directory())  # of Monarch's sockets
    from monarch.actor import start_worker_loop_forever

    start_worker_loop_forever(address=f"{scheme}://{address}:{port}", ca="trust_all_connections")
    run_and_exit(until)  # what runs here dies with this process; Monarch has no other end for its loop


def free_port(address: str) -> int:
    """A port of this address on which nobody listens now."""
    with listen(address, 0) as server:
        return int(server.getsockname()[1])


def hosts_of(environ: Mapping[str, str]) -> int:
    """Over how many hosts torchrun has started this program; 1: it has not, or over one. Raises ConfigError if
    there are several processes on one host, or the variables are not all there."""
    world, here = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "1")
    if not world.isdigit() or int(world) <= 1:
        return 1
    if here != "1":
        raise ConfigError(
            f"torchrun has started {here} processes on this host; titan_rl starts its own: use --nproc-per-node 1"
        )
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]:
        raise ConfigError(
            f"WORLD_SIZE is {world}, as under torchrun, but there is no {', '.join(missing)}: set it too, or unset that"
        )
    return int(world)


def workers(environ: Mapping[str, str], ranks: int, *, trusted: bool) -> tuple[str, ...]:
    """On rank 0: ADDRESS:PORT of every other rank, which end when this process does. `trusted` is
    `placement.trusted_network`, for all ranks. Raises ConfigError if some did not come, or may not listen."""
    store, keys = _store(environ), [WORKER.format(rank) for rank in range(1, ranks)]

    def end() -> None:
        store.set(OVER, "1")
        if not _has_agent(environ):  # the store ends with this process
            with suppress(RuntimeError):
                store.wait([LEFT.format(rank) for rank in range(1, ranks)], timedelta(seconds=LEAVE_SECONDS))

    atexit.register(end)
    store.set(TRUSTED, str(int(trusted)))
    transport(() if trusted or is_loopback(environ["MASTER_ADDR"]) else (environ["MASTER_ADDR"],))
    try:
        store.wait(keys, timedelta(seconds=MEET_SECONDS))
    except RuntimeError as error:  # torch's DistStoreError
        nodes = dict(enumerate(environ.get(NODES, "").split()))
        missing = [rank for rank, key in enumerate(keys, 1) if not store.check([key])]
        names = ", ".join(f"rank {rank}" + f" ({nodes.get(rank)})" * (rank in nodes) for rank in missing)
        raise ConfigError(
            f"{names} of {ranks} did not come within {MEET_SECONDS:g} s: look at what was said there"
        ) from error
    return tuple(store.get(key).decode() for key in keys)


def serve_rank(environ: Mapping[str, str]) -> NoReturn:
    """On any other rank: be a worker until rank 0 is over. Raises ConfigError."""
    store, rank = _store(environ), environ["RANK"]
    address = address_towards(f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}")
    port = free_port(address)

    def wait() -> None:
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 saves the weights, for which it needs this
            signal.signal(stop, signal.SIG_IGN)  # the agent inherits it
        store.set(WORKER.format(rank), f"{address}:{port}")
        try:
            store.wait([OVER], FOR_EVER)
        except RuntimeError:
            sys.exit(f"rank {rank} ends: rank 0 is gone without a word, and the store of the ranks with it")
        with suppress(RuntimeError):
            store.set(LEFT.format(rank), "1")

    try:
        trusted = store.get(TRUSTED) == b"1"
    except RuntimeError as error:
        raise ConfigError(f"rank 0 did not start a run within {MEET_SECONDS:g} s") from error
    serve_host(address, port, trusted=trusted, until=wait)


def _has_agent(environ: Mapping[str, str]) -> bool:
    """Whether the store is torchrun's, which is there before any rank is started and outlives rank 0."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(environ: Mapping[str, str]) -> Store:
    """Where the ranks meet, with keys of this attempt of torchrun alone (`--max-restarts`): its store outlives them.
    Rank 0's own listens on MASTER_ADDR, and on no other address."""
    address, port, seconds = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), timedelta(seconds=MEET_SECONDS)
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise ConfigError(
            f"the ranks meet at the host {address}, and this host does not know that name ({error.strerror}): add "
            "`--local-addr ADDRESS` to every torchrun, with the IP address of its host, or the name to /etc/hosts"
        ) from error
    from torch.distributed import PrefixStore, TCPStore

    is_master = environ["RANK"] == "0" and not _has_agent(environ)
    listening = listen(address, port).detach() if is_master else None
    try:
        store = TCPStore(
            address, port, is_master=is_master, timeout=seconds, wait_for_workers=False, master_listen_fd=listening
        )
    except RuntimeError as error:
        raise ConfigError(f"the rendezvous of the ranks at {address}:{port} does not answer: {error}") from error
    return PrefixStore(f"titan_rl/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _act(command: Command, prog: str) -> int:
    where = command.values.get("--listen", "")
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit() or host in ("0.0.0.0", "[::]"):
        given = f", not {where!r}" if where else ""
        raise ConfigError(
            f"say where to listen: --listen ADDRESS:PORT{given}; the one address under which other hosts reach this one"
        )
    number = int(port) or free_port(host)

    def wait() -> None:
        # not blocked and waited for: every process of a run here would inherit that
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(stop, lambda *_: sys.exit())
        warning = WARNING if transport() == "tcp" else "TLS: whoever has a certificate of the run can run any code here"
        print(f"{prog} listens on {host}:{number} ({warning}); Ctrl-C ends it", flush=True)
        while True:
            signal.pause()

    serve_host(host, number, trusted="--trusted-network" in command.flags, until=wait)


VERB = Verb(
    act=_act,
    about="""
usage: {prog} --listen ADDRESS:PORT [--trusted-network]

Lend this host to runs that are started elsewhere with --hosts ADDRESS:PORT.

Whoever reaches the port can run any code here. Use it on trusted networks only, or with TLS: set HYPERACTOR_TLS_CERT,
HYPERACTOR_TLS_KEY and HYPERACTOR_TLS_CA on every host.""",
    options={
        "--listen ADDRESS:PORT": "IP address under which other hosts reach this one, and a free port (0: any)",
        "--trusted-network": "needed for any address but loopback, unless there is TLS",
    },
    takes_settings=False,
)
