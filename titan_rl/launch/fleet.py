"""A fleet that changes while it works: hosts join, come back and leave; generators are added and taken away.

    titan-rl fleet RUN … ──▶ RUN/control, a socket ──▶ FleetControl ──▶ Meshes: attach, place again, start, empty

- A host joins only if it fits to the others. A generator that joins serves only after a verified pull.
- There are never fewer generators than `placement.least_generators`, or more than `placement.most_generators`.
- What a host takes with it is placed elsewhere, or the host does not leave. The trainer's hosts stay.
- A host that was lost is taken back as soon as its worker answers again.
- One command is carried out after the other. What is removed while it is drained leaves at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.controller.faults import Restarts, kind_of
from titan_rl.errors import ConfigError, MeshLeaves, TitanError
from titan_rl.launch.hosts.facts import transport
from titan_rl.launch.hosts.host import AttachedHost, Host, Needed
from titan_rl.launch.process import scratch_directory
from titan_rl.launch.resume import CONTROL

if TYPE_CHECKING:
    from titan_rl.launch.meshes import Meshes

AGAIN_SECONDS = 1.0
"""Least pause before a lost host is tried again."""

_log = logging.getLogger(__name__)


def in_service(meshes: Meshes) -> int:
    """Generators that are to serve: those that were not left out, spares aside."""
    return len({*meshes.fleet} - meshes.left_out) - meshes.spares


def first_kind_serving(meshes: Meshes, without: Sequence[str] = ()) -> int:
    """Generators of `generator` that are to serve."""
    fleet = [name for name in meshes.fleet if name not in without]
    return sum(meshes.config.generator_group(name) == "generator" for name in fleet) - meshes.spares


class FleetControl:
    """Carries out commands on the meshes of one run or service, which are up."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._hosts_ever = len(meshes.workers)
        self._generators_ever = len(meshes.fleet)
        self._drains: dict[str, asyncio.Future[None]] = {}  # by generator

    async def do(self, verb: str, names: Sequence[str], generators: int | None) -> list[str]:
        """Carry out a command.

        Args:
            verb: `show`, `add`, `drain` or `remove`.
            names: to add: ADDRESS:PORT of workers; else generators or hosts.
            generators: how many to add; None: as many as new hosts have room for, without new hosts one.

        Returns:
            What to tell the user, in lines.

        Raises:
            ConfigError: it cannot be done; says what has changed, if anything has.
            HostLost: a host to add does not answer.
        """
        match verb:
            case "show":
                return await self.describe()
            case "add":
                return await self._add(names, generators)
            case "drain" | "remove":
                for name in names:
                    if name not in (there := self._there()):
                        raise ConfigError(f"there is no host or generator {name!r}; there are {', '.join(there)}")
                if verb == "remove":
                    self._end_drains(names)
                async with self._meshes.changing:
                    for name in dict.fromkeys(names):
                        if name in self._there():  # otherwise it has left meanwhile
                            await self._take_away(name, drain=verb == "drain")
                    return [f"{name} has left" for name in names]
        raise ConfigError(f"there is no command {verb!r}")

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
                    state = f"up for {time.monotonic() - up:.0f} s" if up is not None else "starts"
                    state = "left out, because it failed too often" if mesh.name in meshes.left_out else state
                    if up is not None and (status := known.get(mesh.name)) is not None:
                        at = f" {status.version}" if status.version else ""
                        state += f", {status.state}{at}, {status.in_flight} requests"
                    lines.append(f"  {mesh.name.ljust(12)} {state}")
        lines += [
            f"{name} ({worker}) is lost, and awaited; a worker that was started again needs another port, and `add`"
            for name, worker in meshes.workers.items()
            if name not in meshes.hosts
        ]
        return [*lines, *(f"{name}: no host has room" for name in meshes.fleet if name not in meshes.names)]

    # More.

    async def _add(self, workers: Sequence[str], generators: int | None) -> list[str]:
        meshes, where = self._meshes, self._meshes.config.placement
        if workers and not where.several_hosts:
            raise ConfigError(
                "the run listens to no network: start it with --placement.address ADDRESS --trusted-network, the "
                "address of its host at which the others reach it"
            )
        async with meshes.changing:
            most = where.most_generators - len(meshes.fleet) + meshes.spares if where.most_generators else None
            if most is not None and (most < (generators or 0) or not (workers or most)):
                raise ConfigError(
                    f"there are {len(meshes.fleet) - meshes.spares} generators, and placement.most_generators is "
                    f"{where.most_generators}: nothing has changed"
                )
            joined = self._names_for(workers)
            await meshes.join(joined)
            meshes.workers |= joined
            meshes.place_again()
            await start_missing(meshes)  # what had no room before comes first
            lines = [f"{name} ({worker}) has joined" for name, worker in joined.items()]
            for line in lines:
                meshes.say(line)
            wanted = generators if generators is not None else sum(map(self._fits, joined)) if joined else 1
            new = [f"generator{self._generators_ever + number}" for number in range(wanted)][:most]
            while without := [name for name in new if name not in meshes.trial([*meshes.fleet, *new]).names]:
                if generators is not None or not joined:
                    done = "; ".join([*lines, f"no host has room for {', '.join(without)}"])
                    raise ConfigError(f"{done}: no generator was added")
                new = new[:-1]
            return [*lines, *await self._grow(new)]

    def _fits(self, host: str) -> int:
        """Generators for which a new host may have room."""
        ranks = self._meshes.config.generator.tensor_parallel
        devices = len(self._meshes.hosts[host].facts.cuda_devices)
        return devices // ranks if self._meshes.placement.device == "cuda" else 1

    def _names_for(self, workers: Sequence[str]) -> dict[str, str]:
        """The workers by the names of their hosts: the old one of a host that was lost."""
        meshes = self._meshes
        there = {worker: name for name, worker in meshes.workers.items() if name in meshes.hosts}
        lost = {worker: name for name, worker in meshes.workers.items() if name not in meshes.hosts}
        if already := [f"{worker} is {there[worker]} already" for worker in workers if worker in there]:
            raise ConfigError(already[0])
        where = dataclasses.replace(meshes.config.placement, hosts=(*there, *workers))  # refuses what does not fit
        transport(where.untrusted())
        names = {}
        for worker in workers:
            self._hosts_ever += worker not in lost
            names[lost.get(worker, f"host{self._hosts_ever}")] = worker
        return names

    async def _grow(self, new: Sequence[str]) -> list[str]:
        meshes = self._meshes
        self._generators_ever += len(new)
        meshes.fleet += new
        meshes.place_again()
        await meshes.router.resize(first_kind_serving(meshes))
        await start_missing(meshes)
        lines = [
            f"{name} is up on {meshes.placement.mesh(name).hosts[0]}; it serves, or waits as a spare, once it has "
            "pulled and verified the newest weights"
            if name in meshes.up
            else f"{name} did not start; the log says why"
            for name in new
        ]
        for line in lines:
            meshes.say(line)
        return lines

    # Less.

    def _there(self) -> list[str]:
        return list(dict.fromkeys([*self._meshes.hosts, *self._meshes.workers, *self._meshes.fleet]))

    def _end_drains(self, names: Sequence[str]) -> None:
        """Of these generators, and of those on these hosts."""
        for mesh in self._meshes.placement.meshes:
            if mesh.name in self._drains and {mesh.name, *mesh.hosts} & {*names}:
                self._drains[mesh.name].cancel()

    async def _spares(self, names: Sequence[str]) -> list[str]:
        """Those that sleep as spares now."""
        asleep = (each.name for each in await self._meshes.router.fleet_status() if each.state == "asleep")
        return [name for name in asleep if name in names]

    async def _take_away(self, name: str, *, drain: bool) -> None:
        meshes, spares = self._meshes, await self._spares([name])
        least = meshes.config.placement.least_generators
        if name in meshes.hosts:
            await self._leave(name, drain=drain)
        elif name in meshes.workers:
            del meshes.workers[name]  # it is lost, and not taken back any more
        elif name not in (*meshes.left_out, *spares) and in_service(meshes) <= least:
            raise ConfigError(f"{name} stays: placement.least_generators is {least}, and no more serve, spares aside")
        else:
            meshes.spares -= len(spares)
            await self._drain([name], without=[name], drain=drain)
            await self._stop([name], "it was taken away by command")

    async def _leave(self, host: str, *, drain: bool) -> None:
        meshes = self._meshes
        on_it = [mesh.name for mesh in meshes.placement.meshes if host in mesh.hosts]
        if host == "host0" or "trainer" in on_it:
            whose = "the controller" if host == "host0" else "ranks of the trainer"
            raise ConfigError(f"{host} stays: it has {whose}. Stop the run, and resume it with other --hosts")
        generators = [name for name in meshes.fleet if name in on_it]
        may_go = max(0, in_service(meshes) - meshes.config.placement.least_generators)
        spares = await self._spares(generators)
        gone = [*spares, *(name for name in generators if name in meshes.left_out)]
        gone += [name for name in generators if name not in gone][:may_go]
        stay = [name for name in on_it if name not in gone and kind_of(name) != "relay"]
        there = meshes.trial([name for name in meshes.fleet if name not in gone], without=host).names
        if without := [name for name in stay if name not in there]:
            raise ConfigError(f"{host} stays: no other host has room for {', '.join(without)}")
        meshes.spares -= len(spares)
        await self._drain(generators, without=gone, drain=drain)
        meshes.leaving.add(host)
        meshes.workers.pop(host, None)
        reason = f"{host} leaves"
        await self._stop(gone, reason)
        for mesh in meshes.provisioner.on(host):
            meshes.faults.report(MeshLeaves(reason, mesh))
        await meshes.until(lambda: not meshes.provisioner.on(host))
        await meshes.provisioner.leave(host)
        meshes.leaving.discard(host)

    async def _drain(self, names: Sequence[str], *, without: Sequence[str], drain: bool) -> None:
        """Let generators finish what they have, of which some will not be there any more."""
        meshes = self._meshes
        await meshes.router.resize(first_kind_serving(meshes, without))
        if drain:
            self._drains = {name: asyncio.ensure_future(meshes.router.drain(name)) for name in names}
            for result in await asyncio.gather(*self._drains.values(), return_exceptions=True):
                if isinstance(result, Exception):  # what it has goes on elsewhere
                    _log.warning("not drained: %s", result)
            self._drains = {}

    async def _stop(self, names: Sequence[str], reason: str) -> None:
        """Take generators out of the fleet."""
        meshes = self._meshes
        meshes.fleet = [name for name in meshes.fleet if name not in names]
        meshes.place_again()
        for name in names:
            meshes.left_out.discard(name)
            await meshes.router.generator_left_out(name, reason)
            meshes.faults.report(MeshLeaves(reason, name))
        await meshes.until(lambda: not any(name in meshes.up for name in names))


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
    try:
        link.unlink(missing_ok=True)  # of a controller that was killed
        link.symlink_to(socket)
    except OSError as error:
        meshes.say(f"`titan-rl fleet` cannot reach this run: {link} cannot be made: {error.strerror or error}")
    try:
        yield
    finally:
        server.close()
        for task in commands:
            task.cancel()
        await asyncio.gather(*commands, return_exceptions=True)
        socket.unlink(missing_ok=True)
        with suppress(OSError):  # the run ends for its own reason
            link.unlink(missing_ok=True)


async def refuse_unfit(meshes: Meshes, host: Host) -> None:
    """Raises ConfigError if a host lacks what its part of the run needs; says what it may lack."""
    if isinstance(host, AttachedHost):
        on_it = "trainer" in meshes.specs and host.name in meshes.specs["trainer"].plan.hosts
        runs = meshes.log_directory.parent if meshes.log_directory and on_it else None
        processes = meshes.placement.processes
        needed = Needed(meshes.config, meshes.serving, processes, meshes.model_path, meshes.imports, runs)
        for warning in await host.refuse_unfit(needed):
            meshes.say(warning)


async def start_missing(meshes: Meshes) -> None:
    """Start what has a place, but is neither up nor starting, also a generator that was left out before. One call at a
    time, under `Meshes.changing`."""

    def missing() -> list[str]:
        return [name for name in meshes.names if name not in meshes.up and name not in meshes.starting]

    for name in missing():
        meshes.left_out.discard(name)
        meshes.restarts[name] = Restarts(meshes.config.placement.restarts)
    # others need the handles of relays
    await asyncio.gather(*(meshes.start(name) for name in missing() if kind_of(name) == "relay"))
    await asyncio.gather(*(meshes.start(name) for name in missing() if kind_of(name) != "relay"))


async def rejoin(meshes: Meshes, name: str, worker: str) -> None:
    """Take a lost host back when its worker answers again, unless somebody removes it. What had no room without it
    starts there."""
    tries = Restarts(0)
    while meshes.workers.get(name) == worker and name not in meshes.hosts:
        tries.died(0.0)
        await asyncio.sleep(max(AGAIN_SECONDS, tries.pause))
        async with meshes.changing:
            if meshes.workers.get(name) != worker or name in meshes.hosts:
                return
            try:
                await meshes.join({name: worker})
                meshes.say(f"{name} ({worker}) is back")
                meshes.place_again()
                await start_missing(meshes)
            except TitanError as error:
                _log.info("%s", error)
