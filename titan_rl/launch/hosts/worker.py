"""`titan-rl worker --listen ADDRESS:PORT`: lends this host to one run after the other.

Whoever reaches the port can run any code here: trusted networks only, or TLS (`facts.TLS`). The worker listens on the
address that it is given and on no other. It starts nothing by itself; a run's controller starts an agent, which ends
with everything that the run has here when it is told to, or does not hear of the controller any more.

A worker that was killed is started again at another port while its run goes on. At the old one Monarch 0.7 forwards
what is sent to its dead processes to itself, hop by hop, until it fails the actor that has sent it ("ttl expired"),
whatever that actor's `_handle_undeliverable_message` says.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from titan_rl.errors import ConfigError
from titan_rl.gateway.config import is_loopback, listen
from titan_rl.launch.hosts.facts import transport
from titan_rl.launch.process import prepare_controller, scratch_directory
from titan_rl.overrides import Command, Verb
from titan_rl.processes import leave

WARNING = "whoever reaches this port can run any code here: trusted networks only"


def serve_host(address: str, port: int, *, trusted: bool, until: Callable[[], object]) -> NoReturn:
    """Lend this host to controllers; the process ends when `until` returns or raises.

    Args:
        address: IP address to listen on.
        trusted: every machine that reaches the address may be trusted.
        until: called once the worker listens.

    Raises:
        ConfigError: nobody may or can listen there.
    """
    scheme = transport(() if trusted or is_loopback(address) else (address,))
    listen(address, port).close()
    prepare_controller()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TMPDIR"] = str(scratch_directory())  # of Monarch's sockets
    from monarch.actor import start_worker_loop_forever

    start_worker_loop_forever(address=f"{scheme}://{address}:{port}", ca="trust_all_connections")
    leave(until)  # what runs here dies with this process; Monarch has no other end for its loop


def free_port(address: str) -> int:
    """A port of this address on which nobody listens now."""
    with listen(address, 0) as server:
        return int(server.getsockname()[1])


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
)
