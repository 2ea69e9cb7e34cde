"""Config of the gateway, and listening on its address: tried before a run starts, done by its server."""

import errno
import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass

from titan_rl.bounds import Count, Port
from titan_rl.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class GatewayConfig:
    """Where the HTTP server listens, who may talk to it, and how much one call may ask for."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs keys: whoever reaches the port could use the model."""
    port: Port = 8000
    """0: any free port; the one that was taken is printed."""
    api_key: str = ""
    """What clients send as `Authorization: Bearer …`, for everything but `/health`. Empty: no key is asked for."""
    rollout_keys: bool = False
    """Inside a run: every rollout has a key of its own, and no other is good."""
    model: str = "policy"
    """Name under which the policy is listed, and which requests must give."""
    max_body_bytes: Count = 8 << 20
    """A longer request body is refused (413), and not kept while it is read."""
    cors_origins: tuple[str, ...] = ()
    """Origins, such as `https://chat.example`, whose pages a browser may let call the gateway; `*`: all."""
    max_choices: Count = 128
    """Completions that one call may ask for (`n` times its prompts)."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model-name must not be empty")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("--api-key must be of printable ASCII characters: it travels in an HTTP header")
        if self.rollout_keys and self.api_key:
            raise ConfigError("gateway.rollout_keys gives every rollout a key of its own: leave gateway.api_key out")
        if not self.api_key and not self.rollout_keys and not is_loopback(self.host):
            remedy = "name a key that clients must send (--api-key), or listen on 127.0.0.1"
            raise ConfigError(f"--host {self.host} can be reached from other machines: {remedy}")


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own."""
    with suppress(ValueError):  # a name, which may resolve to anything
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


_REMEDIES = {
    errno.EADDRINUSE: "; name another one, or 0 for any free port",
    errno.EADDRNOTAVAIL: "; it is no address of this host, whose own are listed by `ip address`",
}


def listen(host: str, port: int, *, backlog: int = 1) -> socket.socket:
    """A socket that listens there; port 0: on any free one. Raises ConfigError, which says why it cannot listen."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6
        return socket.create_server(address[:2], family=family, backlog=backlog, dualstack_ipv6=both)
    except OSError as error:
        why, remedy = str(error.strerror or error).partition(" (while ")[0], _REMEDIES.get(error.errno or 0, "")
        raise ConfigError(f"cannot listen on {host}, port {port}: {why}{remedy}") from error
