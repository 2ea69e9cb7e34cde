"""Listening on the gateway's address: tried before a run starts, and done by its server. Standard library only."""

from __future__ import annotations

import errno
import socket

from titan_rl.errors import ConfigError


def listen(host: str, port: int, *, backlog: int = 1) -> socket.socket:
    """A socket that listens there; port 0: on any free one.

    Raises:
        ConfigError: nobody can listen there, and why.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6
        return socket.create_server(address[:2], family=family, backlog=backlog, dualstack_ipv6=both)
    except OSError as error:
        remedy = "; name another one, or 0 for any free port" * (error.errno == errno.EADDRINUSE)
        why = error.strerror or error
        raise ConfigError(f"cannot listen on {host}, port {port}: {why}{remedy}") from error
