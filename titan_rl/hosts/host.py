"""What a host of a run is, and the controller's own, host 0. Every other one is an `AttachedHost`.

- A process is started, watched and killed through the `Host` that it is on, in one way for every host.
- With one host nothing listens on a network.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch.actor import enable_transport, shutdown_context, this_host

from titan_rl.config import PlacementConfig
from titan_rl.gateway.config import listen
from titan_rl.hosts.facts import HostFacts, address_towards, detect_host, transport
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.supervision.child import ProcessWatch
from titan_rl.supervision.process import scratch_directory
from titan_rl.weights.segment_files import remove_segments_of

LEAVE_SECONDS = 1.0
"""Bound on the end of Monarch's runtime in the controller, after all meshes were stopped. Monarch has the same one."""

Ended = Callable[[str, str, int | None], None]
"""Told of the end of a process: the spawn, the process, its exit code. See `ProcessWatch`."""

_log = logging.getLogger(__name__)
_serial = itertools.count()


def listen_for(where: PlacementConfig) -> tuple[str, int]:
    """Let Monarch listen for other hosts, on `placement.address` or the interface that leads to the first of them.
    Returns this address, empty if there will be none, and a port of it that is open as long as this process lives:
    nobody is let in. Call it before any other call of Monarch's. Raises ConfigError: see `transport`; or the first
    one's name is not known, no network leads there, or the address is none of this host's.
    """
    if not where.several_hosts:
        return "", 0
    scheme, address = transport(where.untrusted()), where.address or address_towards(where.hosts[0])
    door = listen(address, 0)
    enable_transport(f"{scheme}://{address}:0")
    port = door.getsockname()[1]
    door.detach()  # never closed
    return address, port


class Host(ABC):
    """One machine of a run."""

    label: str
    """Its name for people."""
    facts: HostFacts
    owner: int
    """Process that owns the run's files in its shared memory."""
    scratch: Path
    """Directory for files that end with that process."""
    logs: str
    """Directory of log files; empty: processes print to the terminal."""
    python: str
    mesh: Any
    """Monarch's handle."""
    lost = ""
    """Why it cannot be used any more."""

    @property
    def name(self) -> str:
        return self.facts.name

    @abstractmethod
    def any_ended(self, spawn: str) -> bool:
        """Whether a process of this spawn has ended, as far as is known here."""

    @abstractmethod
    async def expect_ends(self, spawn: str, kill: bool) -> None:
        """As `ProcessWatch` does."""

    @abstractmethod
    async def end(self, spawn: str) -> None:
        """As `ProcessWatch` does."""

    @abstractmethod
    async def remove_segments(self, channel: str) -> None:
        """Remove the run's files in its shared memory that belong to a channel; empty: all."""

    @abstractmethod
    async def detach(self) -> None:
        """The run does not need the host any more; its meshes are stopped. Never raises."""

    @abstractmethod
    async def require_same(self, tiny: TinyPolicyConfig | None, model_path: Path, imports: tuple[str, ...]) -> None:
        """Raises ConfigError unless the policy and the user's modules are there as they are on the controller's host.

        Args:
            tiny: of the policy, if it is a tiny one, which is made there.
        """

    @abstractmethod
    async def require_sees(self, run_directory: Path) -> None:
        """Raises ConfigError if the run directory, where the trainer writes checkpoints, is not there."""


@functools.cache
def _leave_at_exit() -> None:
    """Call when Monarch is up, so that this runs before Monarch's own `atexit` function: that one prints a traceback if
    the runtime does not end in time, as on a busy host, though nothing depends on it any more."""

    def leave() -> None:
        try:
            shutdown_context(host_timeout=LEAVE_SECONDS / 3).get(timeout=LEAVE_SECONDS)
        except Exception as error:
            _log.info("Monarch did not end in time: %s: %s", type(error).__name__, error)

    atexit.register(leave)


class ControllersHost(Host):
    """Host 0."""

    def __init__(
        self,
        *,
        log_directory: str,
        on_end: Ended,
        on_broken: Callable[[str], None],
        address: str = "",
    ) -> None:
        self.facts = detect_host(address=address)
        self.label = self.facts.name
        self.owner, self.logs, self.python = os.getpid(), log_directory, sys.executable
        self.scratch = scratch_directory() / f"host-{next(_serial)}"
        self.scratch.mkdir()
        self._watch = ProcessWatch(self.scratch, on_end=on_end, on_broken=on_broken)

    @property
    def mesh(self) -> Any:  # type: ignore[override]
        """If this call starts Monarch, its sockets are put into the scratch directory."""
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(scratch_directory())
        try:
            here = this_host()
            _leave_at_exit()
            return here
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before

    def any_ended(self, spawn: str) -> bool:
        return self._watch.any_ended(spawn)

    async def expect_ends(self, spawn: str, kill: bool) -> None:
        await asyncio.to_thread(self._watch.expect_ends, spawn, kill)

    async def end(self, spawn: str) -> None:
        await asyncio.to_thread(self._watch.end, spawn)

    async def remove_segments(self, channel: str) -> None:
        remove_segments_of(os.getpid(), channel=channel)

    async def detach(self) -> None:
        self._watch.close()

    async def require_same(self, tiny: TinyPolicyConfig | None, model_path: Path, imports: tuple[str, ...]) -> None: ...

    async def require_sees(self, run_directory: Path) -> None: ...
