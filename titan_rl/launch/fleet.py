"""A fleet that changes while it works: hosts join, come back and leave; generators are added and taken away.

    titan-rl fleet RUN … ──▶ RUN/control, a socket ──▶ FleetControl ──▶ Meshes: attach, place again, start, empty

- A host joins only if it fits to the others. A generator that joins serves only after a verified pull.
- Never are there fewer generators than `placement.least_generators`, nor more than `placement.most_generators`.
- What a host takes with it is placed elsewhere, or the host does not leave. The trainer's hosts stay.
- A host that was lost is taken back as soon as its worker answers again.
- One command is carried out after the other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.controller.faults import Restarts, kind_of
from titan_rl.errors import ConfigError, MeshFailed, TitanError
from titan_rl.launch.process import scratch_directory
from titan_rl.launch.resume import CONTROL

if TYPE_CHECKING:
    from titan_rl.launch.meshes import Meshes

AGAIN_SECONDS = 1.0
"""Least pause before a lost host is tried again."""

_log = logging.getLogger(__name__)


def in_service(meshes: Meshes) -> int:
    """Generators that are to serve: those that were not left out, spares aside."""
    return len({*meshes.fleet} - meshes.left_out) - meshes.config.placement.spares


def first_kind_serving(meshes: Meshes) -> int:
    """Generators of `generator` that are to serve."""
    own = [name for name in meshes.fleet if meshes.config.generator_group(name) == "generator"]
    return len(own) - meshes.config.placement.spares


class FleetControl:
    """Carries out commands on the meshes of one run or service, which are up."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._one = asyncio.Lock()

    async def do(self, verb: str, names: Sequence[str], generators: int | None) -> list[str]:
        """Carry out a command.

        Args:
            verb: `show`, `add`, `drain` or `remove`.
            names: to add: ADDRESS:PORT of workers; else generators or hosts.
            generators: how many to add; None: as many as new hosts have room for, without new hosts one.

        Returns:
            What to tell the user, in lines.

        Raises:
            ConfigError: it cannot be done; nothing has changed.
            HostLost: a host to add does not answer.
        """
        if verb == "show":
            return await self.describe()
        async with self._one:
            if verb == "add":
                return await self._add(names, generators)
            for name in names:
                if name in self._meshes.hosts:
                    await self._leave(name, drain=verb == "drain")
                elif self._meshes.workers.pop(name, None) is None:  # else it is lost, and not taken back any more
                    await self._take_away(name, drain=verb == "drain")
            return [f"{name} has left" for name in names]

    async def describe(self) -> list[str]:
        """Every host and every mesh."""
        meshes = self._meshes
        known = {each.name: each for each in await meshes.router.fleet_status()}
        lines = []
        for host in meshes.hosts.values():
            devices = f", {len(host.facts.cuda_devices)} CUDA devices" if host.facts.cuda_devices else ""
            where = f" at {host.facts.address}" if host.facts.address else ""
            leaves = ", is being emptied" if host.name in meshes.leaving else ""
            lines.append(f"{host.name}{where}: {host.facts.cpus} CPUs{devices}{leaves}")
            for mesh in meshes.placement.meshes:
                if host.name in mesh.hosts:
                    up = meshes.up.get(mesh.name)
                    state = "starts" if up is None else f"up for {time.monotonic() - up:.0f} s"
                    if up is not None and (status := known.get(mesh.name)) is not None:
                        at = f" {status.version}" if status.version else ""
                        state += f", {status.state}{at}, {status.in_flight} requests"
                    lines.append(f"  {mesh.name.ljust(12)} {state}")
        return lines

    async def _add(self, workers: Sequence[str], generators: int | None) -> list[str]:
        meshes, where = self._meshes, self._meshes.config.placement
        if workers and not where.several_hosts:
            raise ConfigError(
                "the run listens to no network: start it with --placement.address ADDRESS, the one of its host at "
                "which the others reach it"
            )
        for worker in workers:
            where.refuse_worker(worker)
        joined = self._names_for(workers)
        room = where.most_generators - in_service(meshes) if where.most_generators else None
        if room is not None and (room < (generators or 0) or not (workers or room)):
            raise ConfigError(
                f"there are {in_service(meshes)} generators, and placement.most_generators is {where.most_generators}"
            )
        await meshes.join(joined)
        if generators is None:
            generators = sum(self._fits(host) for host in joined) if joined else 1
            generators = generators if room is None else min(generators, room)
        return [*(f"{name} ({worker}) has joined" for name, worker in joined.items()), *await self._grow(generators)]

    def _fits(self, host: str) -> int:
        """Generators for which a new host has room."""
        meshes = self._meshes
        ranks = meshes.config.generator.tensor_parallel
        return len(meshes.hosts[host].facts.cuda_devices) // ranks if meshes.placement.device == "cuda" else 1

    def _names_for(self, workers: Sequence[str]) -> dict[str, str]:
        """The workers by the names of their hosts: the old one of a host that was lost."""
        names: dict[str, str] = {}
        for worker in workers:
            known = next((name for name, other in self._meshes.workers.items() if other == worker), "")
            if known in self._meshes.hosts:
                raise ConfigError(f"{worker} is {known} already")
            names[known or f"host{len(self._meshes.workers) + len(names) + 1}"] = worker
        return names

    async def _grow(self, count: int) -> list[str]:
        meshes = self._meshes
        new = [f"generator{self._meshes.ever + number}" for number in range(count)]
        meshes.fleet += new
        meshes.place_again()
        if without := [name for name in new if name not in meshes.names]:
            meshes.fleet = [name for name in meshes.fleet if name not in new]
            meshes.place_again()
            raise ConfigError(f"no host has room for {', '.join(without)}: nothing was added")
        meshes.ever += count
        await meshes.router.resize(first_kind_serving(meshes))
        await start_missing(meshes)
        return [
            f"{name} is up on {meshes.placement.mesh(name).hosts[0]}; it serves once it has pulled and verified the "
            "newest weights"
            if name in meshes.up
            else f"{name} did not start; the log says why"
            for name in new
        ]

    async def _take_away(self, name: str, *, drain: bool) -> None:
        meshes = self._meshes
        if name not in meshes.fleet:
            raise ConfigError(
                f"there is no host or generator {name!r}; there are {', '.join([*meshes.hosts, *meshes.fleet])}"
            )
        if name not in meshes.left_out and in_service(meshes) <= (least := meshes.config.placement.least_generators):
            raise ConfigError(f"{name} stays: placement.least_generators is {least}, and no more are there")
        await self._shrink([name], "it was taken away by command", drain=drain)

    async def _shrink(self, names: Sequence[str], reason: str, *, drain: bool) -> None:
        """Take these generators away, which may be out of `fleet` already."""
        meshes = self._meshes
        meshes.fleet = [name for name in meshes.fleet if name not in names]
        await meshes.router.resize(first_kind_serving(meshes))
        if drain:
            await asyncio.gather(*map(meshes.router.drain, names))
        meshes.place_again()
        for name in names:
            meshes.faults.report(MeshFailed(reason, name))
        await meshes.until(lambda: not any(name in meshes.up for name in names))

    async def _leave(self, host: str, *, drain: bool) -> None:
        meshes = self._meshes
        on_it = {mesh.name for mesh in meshes.placement.meshes if host in mesh.hosts}
        if host == "host0" or "trainer" in on_it:
            whose = "the controller" if host == "host0" else "ranks of the trainer"
            raise ConfigError(f"{host} stays: it has {whose}. Stop the run, and resume it with other --hosts")
        more_than_least = max(0, in_service(meshes) - meshes.config.placement.least_generators)
        gone = [name for name in meshes.fleet if name in on_it][:more_than_least]
        stay = on_it - {*gone, f"relay{host.removeprefix('host')}"}
        before = meshes.fleet
        meshes.fleet = [name for name in before if name not in gone]
        meshes.leaving.add(host)
        meshes.place_again()
        if without := sorted(stay - {*meshes.names}):
            meshes.fleet = before
            meshes.leaving.discard(host)
            meshes.place_again()
            raise ConfigError(f"{host} stays: no other host has room for {', '.join(without)}")
        reason = f"{host} leaves"
        await self._shrink(gone, reason, drain=drain)
        if drain:
            await asyncio.gather(*(meshes.router.drain(name) for name in stay if kind_of(name) == "generator"))
        del meshes.workers[host]
        for mesh in meshes.provisioner.on(host):
            meshes.faults.report(MeshFailed(reason, mesh))
        await meshes.until(lambda: not meshes.provisioner.on(host))
        await meshes.provisioner.leave(host)
        meshes.leaving.discard(host)


@asynccontextmanager
async def controlled(meshes: Meshes, run_directory: Path | None) -> AsyncIterator[None]:
    """Take commands for these meshes inside the block, through `CONTROL` in the run directory.

    A connection carries one command: a line of JSON, the arguments of `FleetControl.do`. The answer is a line of JSON
    too: `{"lines": [...]}` or `{"error": "..."}`. Only this user can connect.
    """
    if run_directory is None:
        yield
        return
    control = FleetControl(meshes)

    commands: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (task := asyncio.current_task()) is not None
        commands.add(task)
        task.add_done_callback(commands.discard)
        try:
            answer: dict[str, object] = {"lines": await control.do(**json.loads(await reader.readline()))}
        except TitanError as error:
            answer = {"error": str(error)}
        except Exception as error:
            _log.exception("a command failed")
            answer = {"error": f"{type(error).__name__}: {error}; the log of the controller has more"}
        with suppress(ConnectionError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    socket, link = scratch_directory() / f"{CONTROL}-{id(control)}", run_directory / CONTROL
    server = await asyncio.start_unix_server(serve, socket)
    link.unlink(missing_ok=True)  # of a controller that was killed
    link.symlink_to(socket)
    try:
        yield
    finally:
        link.unlink(missing_ok=True)
        server.close()
        for task in commands:
            task.cancel()
        await asyncio.gather(*commands, return_exceptions=True)
        socket.unlink(missing_ok=True)


async def start_missing(meshes: Meshes) -> None:
    """Start what has a place, but is neither up nor starting, also a generator that was left out before."""
    missing = [name for name in meshes.names if name not in meshes.up and name not in meshes.starting]
    for name in missing:
        meshes.left_out.discard(name)
        meshes.restarts[name] = Restarts(meshes.config.placement.restarts)
    relays = [name for name in missing if kind_of(name) == "relay"]  # others need their handles
    await asyncio.gather(*map(meshes.start, relays))
    await asyncio.gather(*(meshes.start(name) for name in missing if name not in relays))


async def rejoin(meshes: Meshes, name: str, worker: str) -> None:
    """Take a lost host back when its worker answers again, unless somebody removes it. What had no room without it
    starts there."""
    tries = Restarts(0)
    while name in meshes.workers and name not in meshes.hosts:
        tries.died(0.0)
        await asyncio.sleep(max(AGAIN_SECONDS, tries.pause))
        try:
            await meshes.join({name: worker})
            meshes.say(f"{name} ({worker}) is back")
            meshes.place_again()
            await start_missing(meshes)
        except TitanError as error:
            _log.info("%s", error)
