"""Does the faults: finds the processes and files of one run from outside, and kills, stops or damages them.

Processes carry a mark in their environment. Files in shared memory carry the process id of the controller or, on other
hosts, of an agent. What is done for a while (a full disk, a cut link) is taken back by `Hit.undo`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from chaos_parts.ground import Ground, There, inner_pid, lives
from chaos_parts.schedule import KINDS, Fault

T = TypeVar("T")

MARK = "TITAN_RL_MARK_OF_THIS_CHAOS"
SHARED = Path("/dev/shm")
WHILE_SECONDS = 5.0
"""How long a passing trouble lasts."""
DAMAGE_SECONDS = 30.0
"""How long to look for a publication that is just being written."""
CALLERS = 100
"""HTTP clients that vanish at once."""


class Process(NamedTuple):
    """A process of a mesh."""

    mesh: str
    rank: int
    pid: int

    def __str__(self) -> str:
        return f"{self.mesh} rank {self.rank} (pid {self.pid})"


@dataclass(slots=True)
class Hit:
    """What was done."""

    what: str
    at: float = field(default_factory=time.time)
    mesh: str = ""
    undo: Callable[[], None] | None = None
    """Takes it back after `WHILE_SECONDS` or more."""


def marked(mark: str) -> list[int]:
    """Living processes with this mark, in whatever session (the environment of a zombie is empty)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def meshes(pids: Sequence[int]) -> list[Process]:
    """Those that belong to a mesh, by their title: `titan_rl MESH rank RANK (…)`."""
    found = []
    for pid in pids:
        with contextlib.suppress(ValueError):
            program, mesh, word, rank, *_ = _title(pid).split(" ")
            if (program, word) == ("titan_rl", "rank"):
                found.append(Process(mesh, int(rank), pid))
    return sorted(found)


def _title(pid: int) -> str:
    """What `ps` shows of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
    except OSError:
        return ""


def listening_ports(pid: int) -> Iterator[int]:
    """TCP ports on which this process listens. Raises OSError if it has ended."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                yield int(fields[1].rpartition(":")[2], 16)


class Attack:
    """Faults on one run.

    Args:
        controller: its process id.
        mark: of its processes.
        run: its directory.
        ground: where it is made.
        noticed: when the run first logged a text since a moment; asked while damage is tried.
    """

    def __init__(
        self, controller: int, mark: str, run: Path, ground: Ground, noticed: Callable[[str, float], float | None]
    ) -> None:
        self._controller = controller
        self._owner = "*" if ground.hosts else inner_pid(controller)
        self._mark = mark
        self._run = run
        self._ground = ground
        self._noticed = noticed

    def inject(self, fault: Fault) -> Hit:
        """Do it. Raises LookupError if there is nothing to hit now."""
        kind, luck = fault.kind, fault.luck
        match kind:
            case "controller killed":
                return self._end_controller(signal.SIGKILL, "was killed")
            case "controller asked to stop":
                return self._end_controller(signal.SIGTERM, "got SIGTERM")
            case "controller killed, newest checkpoint damaged":
                damaged = self._damage_checkpoint()
                return self._end_controller(signal.SIGKILL, f"was killed, {damaged} is damaged")
            case "fork server killed":
                servers = [pid for pid in marked(self._mark) if _title(pid).startswith("titan_rl fork server")]
                server = _pick(servers, luck)
                hit = Hit(f"{_title(server)} (pid {server}) was killed")
                os.kill(server, signal.SIGKILL)
                return hit
            case "environment killed":
                worker = _pick(self._ranks("rollout"), luck)
                child = _pick(_children(worker.pid), luck)
                os.kill(child, signal.SIGKILL)
                return Hit(f"the environment's process of {worker} (pid {child}) was killed")
            case "publication damaged":
                return self._there("trainer", 0.0)(self._damage_publication, KINDS[kind].seen)
            case "sample damaged":
                return self._there("rollout", luck)(self._damage_sample, luck)
            case "shared memory full":
                return self._fill_shared_memory()
            case "disk full":
                return self._fill_disk()
            case "checkpoints not writable":
                return self._block_checkpoints()
            case "file descriptors used up":
                return self._use_up_descriptors(_pick(self._ranks("gateway", "rollout"), luck))
            case "HTTP clients vanish":
                return self._call_and_vanish(luck)
            case "kill host":
                return Hit(self._ground.kill(self._run, luck))
            case "cut link":
                what, mend = self._ground.cut(self._run, luck)
                return Hit(what, undo=mend)
            case "join host":
                return Hit(self._ground.join(self._run, luck))
            case "trainer killed, its copies damaged":
                for there in self._ground.everywhere:
                    there(self._damage_copies)
        return self._hit_mesh(kind, luck)

    def _end_controller(self, number: signal.Signals, how: str) -> Hit:
        os.kill(self._controller, number)
        return Hit(f"the controller (pid {self._controller}) {how}")

    def _hit_mesh(self, kind: str, luck: float) -> Hit:
        ranks = self._ranks(KINDS[kind].part)
        victim = _pick(ranks, luck)
        victims = [each for each in ranks if each.mesh == victim.mesh] if kind == "generator killed" else [victim]
        stopped = KINDS[kind].hangs
        hit = Hit(f"{', '.join(map(str, victims))} {'stopped' if stopped else 'killed'}", mesh=victim.mesh)
        for each in victims:
            os.kill(each.pid, signal.SIGSTOP if stopped else signal.SIGKILL)
        return hit

    def _ranks(self, *parts: str) -> list[Process]:
        """Processes of the meshes of these kinds (`generator1` is a generator)."""
        return [each for each in meshes(marked(self._mark)) if each.mesh.rstrip("0123456789") in parts]

    def _there(self, part: str, luck: float) -> There:
        """The host of a process of such a mesh."""
        return self._ground.there(_pick(self._ranks(part), luck).pid)

    def _segments(self, channel: str) -> list[Path]:
        """Files in a host's shared memory whose channel begins so, the newest last."""
        found = SHARED.glob(f"titan_rl-{self._owner}-{channel}*")
        with contextlib.suppress(FileNotFoundError):
            return sorted(found, key=lambda path: path.stat().st_mtime)
        return []

    def _damage_checkpoint(self) -> str:
        *older, newest = sorted(self._run.glob("checkpoints/step-*")) or [self._run]
        if not older:
            raise LookupError("there is no checkpoint before the newest one")
        _flip(_pick(sorted((newest / "trainer").glob("*.distcp")), 0.0))
        return newest.name

    def _damage_publication(self, seen: str) -> Hit:
        """Damage publications while they are being written, until one is noticed: some are read before that."""
        until, first = time.monotonic() + DAMAGE_SECONDS, time.time()
        ends: dict[Path, bytes] = {}
        hits: list[Hit] = []
        while time.monotonic() < until:
            if hits and not lives(self._controller):
                return hits[-1]  # it could not live with it
            for path in self._segments("policy-"):
                with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(size - min(size, 4096))
                    end = file.read()
                    if ends.setdefault(path, end) != end:  # the last tensor is there, so all are
                        ends[path] = end
                        if not hits or self._noticed(seen, first) is None:  # what comes after that stays sound
                            _flip_in(file, size // 2)
                            hits.append(Hit(f"{path.name} was damaged"))
                            time.sleep(0.5)
                        if (noticed := self._noticed(seen, first)) is not None:
                            return [hit for hit in hits if hit.at <= noticed][-1]
            time.sleep(0.0005)
        raise LookupError("no publication could be damaged before it was read")

    def _damage_copies(self) -> None:
        for copy in self._segments("state."):
            _flip(copy)

    def _damage_sample(self, luck: float) -> Hit:
        sample = _pick(self._segments("samples.")[-8:], 1.0 - luck / 2)
        _flip(sample)
        return Hit(f"{sample.name} was damaged")

    def _fill_shared_memory(self) -> Hit:
        there, filler = self._ground.there(self._controller), SHARED / f"chaos-{self._controller}"

        def fill() -> None:
            free = os.statvfs(SHARED)
            with open(filler, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)

        there(fill)
        return Hit(f"{SHARED} is full for {WHILE_SECONDS:g} s", undo=lambda: there(filler.unlink))

    def _fill_disk(self) -> Hit:
        there, disk = self._there("trainer", 0.0), self._run / "checkpoints"

        def do(*command: str) -> None:
            there(lambda: void(subprocess.run([*command, str(disk)], check=True)))

        do("mount", "-t", "tmpfs", "-o", "size=64k", "chaos")
        return Hit(f"{disk} is on a full disk for {WHILE_SECONDS:g} s or more", undo=lambda: do("umount", "-l"))

    def _block_checkpoints(self) -> Hit:
        """A file is where the directory should be, which stops root too."""
        directory, aside = self._run / "checkpoints", self._run / "checkpoints-aside"
        directory.rename(aside)
        directory.touch()

        def undo() -> None:
            directory.unlink()
            aside.rename(directory)

        return Hit(f"{directory} is a file for {WHILE_SECONDS:g} s or more", undo=undo)

    def _use_up_descriptors(self, victim: Process) -> Hit:
        before = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
        used = max(int(each.name) for each in Path(f"/proc/{victim.pid}/fd").iterdir())
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (used + 1, before[1]))

        def undo() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, before)

        return Hit(f"{victim} cannot open files for {WHILE_SECONDS:g} s", undo=undo)

    def _call_and_vanish(self, luck: float) -> Hit:
        gateway = _pick(self._ranks("gateway"), luck)
        port = min(listening_ports(gateway.pid), default=0)
        if not port:
            raise LookupError(f"{gateway} does not listen")
        address = self._ground.hosts[0].address if self._ground.hosts else "127.0.0.1"
        self._ground.there(gateway.pid)(_connect_and_vanish, address, port)
        return Hit(f"{CALLERS} clients of {gateway} vanished")


def _connect_and_vanish(address: str, port: int) -> None:
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: chaos\r\nContent-Length: 1000\r\n\r\n{"
    for number in range(CALLERS):
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0) as caller:
            caller.sendall(request[: 1 + number * len(request) // CALLERS])
            # the connection is reset instead of closed
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def void(result: object) -> None:
    """For a lambda whose result is of no interest."""


def _pick(found: Sequence[T], luck: float) -> T:
    if not found:
        raise LookupError("there is nothing to hit now")
    return found[min(int(luck * len(found)), len(found) - 1)]


def _children(pid: int) -> list[int]:
    return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) or _scan(pid)


def _scan(parent: int) -> list[int]:
    """Children of any of its threads."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return sorted(found)


def _flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    with open(path, "r+b", buffering=0) as file:
        _flip_in(file, file.seek(0, os.SEEK_END) // 2)


def _flip_in(file: object, place: int) -> None:
    byte = os.pread(file.fileno(), 1, place)  # type: ignore[attr-defined]
    os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), place)  # type: ignore[attr-defined]
