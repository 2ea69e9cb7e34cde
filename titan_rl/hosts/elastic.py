"""The hosts of a run: attached at its start, joining and leaving by command, taken back after they were lost.

    titan-rl fleet RUN … ──▶ RUN/control, a socket ──▶ HostControl ──▶ Supervisor: place again, start, retire

- A host joins only if it fits to the others. It brings generators, which serve only after a verified pull.
- There are never fewer generators than `placement.least_generators`.
- What a host takes with it is placed elsewhere, or the host does not leave. The trainer's hosts stay.
- A host that was lost is taken back as soon as its worker answers again.
- One change is made after the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.actors.router import GeneratorRouter
from titan_rl.directories import CONTROL
from titan_rl.errors import ConfigError, MeshLeaves, TitanError
from titan_rl.hosts.facts import transport
from titan_rl.overrides import Command, Verb, did_you_mean, print_error
from titan_rl.routing.health import Phase
from titan_rl.supervision.managed_mesh import ManagedMesh, MeshState, pause_after
from titan_rl.supervision.placement import Kind
from titan_rl.supervision.process import scratch_directory

if TYPE_CHECKING:
    from titan_rl.hosts.host import AttachedHost, Host
    from titan_rl.supervision.supervisor import Supervisor

VERBS = ("show", "add", "remove")

REJOIN_SECONDS = 1.0
"""Least pause before a lost host is tried again."""

_log = logging.getLogger(__name__)


class HostControl:
    def __init__(self, supervisor: Supervisor, check: Callable[[AttachedHost], Awaitable[None]]) -> None:
        """`check` raises ConfigError if another host lacks what its part of the run needs."""
        self._supervisor, self._table, self._check = supervisor, supervisor.table, check
        self._where = supervisor.config.placement
        self.workers = {f"host{number}": worker for number, worker in enumerate(self._where.hosts, 1)}
        """ADDRESS:PORT by name, of all other hosts that are to belong to the run, also of those that are lost."""
        self._hosts_ever, self._generators_ever = len(self.workers), len(self._table.fleet)
        self._changing = asyncio.Lock()
        self._awaited: set[str] = set()  # lost hosts

    async def place(self) -> None:
        """Attach the hosts of the config, and place the meshes on them. Raises HostLost: a host does not answer;
        ConfigError: the hosts cannot hold the placement, or one lacks something."""
        hosts = await self._join(self.workers)
        self._supervisor.place_again()
        await asyncio.gather(*map(self._check, hosts))

    async def _join(self, workers: Mapping[str, str]) -> list[AttachedHost]:
        """Attach hosts, by the name that each gets. Nothing is placed on them by this. Once there is a placement, they
        are checked first."""
        check, silent = self._check if self._table.placement else None, self._where.host_seconds
        attach = self._supervisor.provisioner.attach
        hosts = await attach(workers, silent_seconds=silent, on_lost=self.lost, check=check)
        if self._where.rdma == "auto":
            await asyncio.gather(*(host.try_rdma(self._supervisor.say) for host in hosts))
        return hosts

    def lost(self, host: Host) -> None:
        self._supervisor.say(host.lost)
        if host.name in self.workers and host.name not in self._awaited:
            self._awaited.add(host.name)
            self._supervisor.run_end.work(self._rejoin(host.name, self.workers[host.name]))

    async def _rejoin(self, name: str, worker: str) -> None:
        """Take a lost host back when its worker answers again, unless somebody removes it. What had no room without it
        starts there."""
        tries = 0
        while self.workers.get(name) == worker and name not in self._table.hosts:
            tries += 1
            await asyncio.sleep(max(REJOIN_SECONDS, pause_after(tries)))
            async with self._changing:
                if self.workers.get(name) == worker and name not in self._table.hosts:
                    try:
                        await self._join({name: worker})
                        self._supervisor.say(f"{name} ({worker}) is back")
                        await self._supervisor.start_missing()
                    except TitanError as error:
                        _log.info("%s", error)
                    except Exception:  # of Monarch, for example: the run goes on without the host
                        _log.exception("%s (%s) could not be taken back", name, worker)
        self._awaited.discard(name)

    async def do(self, verb: str, names: Sequence[str]) -> list[str]:
        """Carry out a command. Returns what to tell the user, in lines. Raises ConfigError: it cannot be done; says
        what has changed, if anything has; HostLost: a host to add does not answer.

        `names`: to add, ADDRESS:PORT of workers; to remove, hosts."""
        match verb:
            case "show":
                return await self._show()
            case "add":
                async with self._changing:
                    return await self._add(names)
            case "remove":
                known = dict.fromkeys([*self._table.hosts, *self.workers])
                for name in names:
                    if name not in known:
                        raise ConfigError(f"there is no host {name!r}; there are {', '.join(known)}")
                async with self._changing:
                    for name in dict.fromkeys(names):
                        await self._remove(name)
                return [f"{name} has left" for name in names]
        raise ConfigError(f"there is no command {verb!r}")

    async def _show(self) -> list[str]:
        supervisor, table = self._supervisor, self._table
        statuses = {each.name: each for each in await supervisor.router.fleet_status()}

        def state(mesh: ManagedMesh) -> str:
            if mesh.state is MeshState.GIVEN_UP:
                return "left out, because it failed too often"
            if not mesh.is_up:
                return "starts"
            up = f"up for {time.monotonic() - mesh.up_since:.0f} s"
            if (status := statuses.get(mesh.name)) is None:
                return up
            return f"{up}, {status.state}{f' {status.version}' if status.version else ''}, {status.in_flight} requests"

        lines = []
        for host in table.hosts.values():
            devices = f", {len(host.facts.cuda_devices)} CUDA devices" if host.facts.cuda_devices else ""
            where = f" at {host.facts.address}" if host.facts.address else ""
            leaves = ", is being emptied" if host.name in table.leaving else ""
            lines.append(f"{host.name}{where}: {host.facts.cpus} CPUs{devices}{leaves}")
            lines += [f"  {mesh.name.ljust(12)} {state(mesh)}" for mesh in table.placed if host.name in mesh.plan.hosts]
        lines += [
            f"{name} ({worker}) is lost, and awaited; a worker that was started again needs another port, and `add`"
            for name, worker in self.workers.items()
            if name not in table.hosts
        ]
        placed = [mesh.name for mesh in table.placed]
        return [*lines, *(f"{name}: no host has room" for name in table.fleet if name not in placed)]

    async def _add(self, workers: Sequence[str]) -> list[str]:
        supervisor, table = self._supervisor, self._table
        if not self._where.several_hosts:
            raise ConfigError(
                "the run listens to no network: start it with --placement.address ADDRESS --trusted-network, the "
                "address of its host at which the others reach it"
            )
        joined = self._names_for(workers)
        await self._join(joined)
        self.workers |= joined
        await supervisor.start_missing()  # what had no room before comes first
        new = [f"generator{self._generators_ever + number}" for number in range(sum(map(self._fits, joined)))]
        while new and not {*new} <= {*table.trial([*table.fleet, *new]).meshes}:
            new.pop()
        self._generators_ever += len(new)
        table.fleet += new
        await supervisor.router.call(GeneratorRouter.resize, table.to_serve())
        await supervisor.start_missing()
        lines = [
            f"{name} ({worker}) has joined{'' if name in table.hosts else ', and is lost again'}"
            for name, worker in joined.items()
        ]
        lines += [
            f"{name} is up on {mesh.plan.hosts[0]}; it serves, or waits as a spare, once it has pulled and verified "
            "the newest weights"
            if (mesh := supervisor.meshes.get(name)) is not None and mesh.is_up
            else f"{name} did not start; the log says why"
            for name in new
        ]
        for line in lines:
            supervisor.say(line)
        return lines

    def _fits(self, host: str) -> int:
        """Generators for which a new host may have room: none, if it was lost meanwhile."""
        if host not in self._table.hosts:
            return 0
        config, devices = self._table.config, len(self._table.hosts[host].facts.cuda_devices)
        ranks = config.generator.tensor_parallel  # each on another device
        places = devices * config.placement.ranks_per_device if devices >= ranks else 0
        assert self._table.placement is not None
        return places // ranks if self._table.placement.device == "cuda" else 1

    def _names_for(self, workers: Sequence[str]) -> dict[str, str]:
        """The workers by the names of their hosts: the old one of a host that was lost."""
        there = {worker: name for name, worker in self.workers.items() if name in self._table.hosts}
        lost = {worker: name for name, worker in self.workers.items() if name not in self._table.hosts}
        if already := [f"{worker} is {there[worker]} already" for worker in workers if worker in there]:
            raise ConfigError(already[0])
        where = dataclasses.replace(self._where, hosts=(*there, *workers))  # refuses what does not fit
        transport(where.untrusted())
        names = {}
        for worker in workers:
            self._hosts_ever += worker not in lost
            names[lost.get(worker, f"host{self._hosts_ever}")] = worker
        return names

    async def _remove(self, host: str) -> None:
        supervisor, table = self._supervisor, self._table
        if (leaving := table.hosts.get(host)) is None:
            self.workers.pop(host, None)  # it is lost, and not taken back any more
            return
        on_it = [mesh for mesh in table.placed if host in mesh.plan.hosts]
        if host == "host0" or any(mesh.kind is Kind.TRAINER for mesh in on_it):
            whose = "the controller" if host == "host0" else "ranks of the trainer"
            raise ConfigError(f"{host} stays: it has {whose}. Stop the run, and resume it with other --hosts")
        generators = [mesh.name for mesh in on_it if mesh.kind is Kind.GENERATOR]
        asleep = [
            each.name for each in await supervisor.router.fleet_status() if each.state in (Phase.ASLEEP, Phase.SPARE)
        ]
        spares = [name for name in generators if name in asleep]
        may_go = max(0, table.to_serve() - len(table.left_out()) - self._where.least_generators)
        gone = [name for name in generators if name in (*spares, *table.left_out())]
        gone += [name for name in generators if name not in gone][:may_go]
        there = table.trial([name for name in table.fleet if name not in gone], without=host).meshes
        stay = [mesh.name for mesh in on_it if mesh.name not in gone and mesh.kind is not Kind.RELAY]
        if without := [name for name in stay if name not in there]:
            raise ConfigError(f"{host} stays: no other host has room for {', '.join(without)}")
        table.spares -= len(spares)
        table.fleet = [name for name in table.fleet if name not in gone]
        table.leaving.add(host)
        self.workers.pop(host, None)
        supervisor.place_again()
        await supervisor.router.call(GeneratorRouter.resize, table.to_serve())
        for mesh in on_it:
            if not mesh.is_idle:  # it starts elsewhere, unless it is not wanted any more
                supervisor.report(MeshLeaves(f"{host} leaves", mesh.name))
        await supervisor.until(lambda: not supervisor.provisioner.on(leaving))
        await supervisor.provisioner.detach(host)
        table.leaving.discard(host)


@asynccontextmanager
async def controlled(control: HostControl, link: Path | None, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Take commands inside the block, through a socket to which `link` will lead.

    A connection carries one command: a line of JSON, the arguments of `HostControl.do`. The answer is a line of JSON
    too: `{"lines": [...]}` or `{"error": "..."}`. Only this user can connect.
    """
    if link is None:
        yield
        return
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

    path = scratch_directory() / f"{link.name}-{id(control)}"
    server = await asyncio.start_unix_server(serve, path)
    try:
        link.unlink(missing_ok=True)  # of a controller that was killed
        link.symlink_to(path)
    except OSError as error:
        say(f"`titan-rl fleet` cannot reach this run: {link} cannot be made: {error.strerror or error}")
    try:
        yield
    finally:
        server.close()
        for task in commands:
            task.cancel()
        await asyncio.gather(*commands, return_exceptions=True)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # the run ends for its own reason
            link.unlink(missing_ok=True)


def _act(command: Command, prog: str) -> int:
    """Returns the exit code: 1 if the run refuses the command."""
    names = command.words
    if not names:
        raise ConfigError("say which run: its directory")
    run, verb, *rest = *names, *(["show"] if len(names) == 1 else [])
    if verb not in VERBS:
        raise ConfigError(f"there is no command {verb!r}{did_you_mean(verb, VERBS)}; there are {', '.join(VERBS)}")
    if verb == "show" and rest:
        raise ConfigError(f"show takes no {rest[0]}")
    if verb != "show" and not rest:
        what = "each host's worker as ADDRESS:PORT" if verb == "add" else f"hosts; `{prog} {run}` names them"
        raise ConfigError(f"say what to {verb}: {what}")
    answer = ask(Path(run), {"verb": verb, "names": rest})
    print("\n".join(answer.get("lines", [])), end="\n" if answer.get("lines") else "")
    if "error" in answer:
        print_error(prog, answer["error"])
        return 1
    return 0


def ask(run: Path, command: dict[str, object]) -> dict[str, list[str]]:
    """The controller's answer. Raises ConfigError if nobody answers there."""
    if not run.is_dir():
        raise ConfigError(f"{run} is no run directory")
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.readlink(run / CONTROL))
        except OSError as error:
            raise ConfigError(
                f"{run} is the directory of no run that is up on this host, or of another user's "
                f"({error.strerror or error})"
            ) from error
        try:
            connection.sendall(json.dumps(command).encode() + b"\n")
            with connection.makefile() as answer:
                return json.loads(answer.readline())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the run in {run} ended before it answered") from error


VERB = Verb(
    act=_act,
    about="""
usage: {prog} RUN                         show its hosts and meshes
       {prog} RUN add ADDRESS:PORT ...    take hosts in, and start generators on them
       {prog} RUN remove HOST ...         take hosts away

RUN is the directory of a run or service that is going on, on this host.

add: each ADDRESS:PORT is a `titan-rl worker`. First starts what had no room. Then a new host brings one generator, on
CUDA as many as it has devices for.
Whoever reaches a worker's port can run any code there: trusted networks only.
remove: requests go on elsewhere from the tokens that they have. A host's generators leave the fleet with it, down to
placement.least_generators; everything else on it moves. A host that is lost is not awaited any more.
A command goes on if this program is ended.""",
    takes_words=True,
    takes_settings=False,
)
