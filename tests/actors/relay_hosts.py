"""Hosts of test_relay.py on one machine: each has a relay, and an owner whose files are its shared memory."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
from collections import Counter
from typing import Any

import torch
from spied_relay import ELEMENTS, SpiedRelay
from support.meshes import mesh_plan
from torch import Tensor

from titan_rl.actors.relay import RelayClient, Relays, WeightRelay
from titan_rl.processes import OWNER
from titan_rl.supervision.provisioner import Provisioner
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.puller import SharedMemoryReader
from titan_rl.weights.segment_files import remove_segments_of, segment_at

TRAINER = "trainer"
SECONDS = 100.0


class RelayHosts:
    """The trainer's host and others. Belongs to one event loop."""

    def __init__(self) -> None:
        self._provisioner = Provisioner(log_directory="", imports=(), on_fault=lambda fault: None)
        self._owners: dict[str, subprocess.Popen[bytes]] = {}
        self.pids: dict[str, int] = {}
        self.relays: dict[str, RelayClient] = {}
        self._births: Counter[str] = Counter()
        self._serial = 0
        self._publisher: SharedMemoryPublisher | None = None
        self._trainer = TRAINER

    async def start(self, *hosts: str) -> None:
        """Relays on more hosts, of which all hear."""
        for host in hosts:
            self._owners[host] = subprocess.Popen(["sleep", "1000"])
            self.relays[host] = RelayClient(f"the relay on {host}", start_seconds=SECONDS)
            self._replace(host)
        await self.tell()

    def spawn(self, host: str, name: str, actor: Any, *args: Any, **options: Any) -> Any:
        """An actor in a process on that host; its constructor takes the host's owner first."""
        mesh = self._provisioner.spawn(mesh_plan(name, beside=__file__))
        return mesh.spawn(name, actor, self._owners[host].pid, *args, **options)

    async def replace(self, host: str) -> None:
        """Another relay, after the one of this host was killed."""
        await self._provisioner.stop(host, kill=True)
        self._replace(host)
        await self.tell()

    def _replace(self, host: str) -> None:
        self.relays[host].replace(self._spawn(host))
        self._births[host] += 1

    async def tell(self) -> None:
        """Each relay of all others."""
        pids = await asyncio.gather(*(relay.setup(relays=self.handles()) for relay in self.relays.values()))
        self.pids = {host: pid for host, (pid,) in zip(self.relays, pids, strict=True)}

    def handles(self) -> Relays:
        return {host: (self._births[host], relay.actor) for host, relay in self.relays.items()}

    async def stop(self) -> None:
        await self._provisioner.stop_all()
        for owner in self._owners.values():
            owner.kill()
            owner.wait()
            remove_segments_of(owner.pid)

    async def call(self, host: str, endpoint: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.relays[host].ranks[0].call(SECONDS, endpoint, *args, **kwargs)

    async def bring(self, host: str, publication: Publication) -> None:
        await self.call(host, WeightRelay.bring, publication)

    async def handed(self) -> dict[str, int]:
        """By host, the chunks that its relay has handed on since the last call."""
        counts = await asyncio.gather(*(self.call(host, SpiedRelay.handed) for host in self.relays))
        return dict(zip(self.relays, counts, strict=True))

    def publish(self, step: int) -> Publication:
        """On the trainer's host, as the controller hears of it; at most two are live."""
        with self.on(self._trainer):
            if self._publisher is None:
                self._publisher = SharedMemoryPublisher(channel="relayed", rank=0, group=None, max_live=2)
            if len(live := sorted(self._publisher._live)) == 2:
                self._publisher.release(live[0])
            shard = TensorShard(name="t", data=weights(step), global_shape=(ELEMENTS,), offset=(0,))
            self._serial += 1
            published = self._publisher.publish(PolicyVersion(0, step), [shard], dtype=torch.float32)
            return dataclasses.replace(published, serial=self._serial, hosts=(self._trainer,))

    def move_trainer(self, host: str) -> None:
        """What is published from now on is made there."""
        self._trainer, self._publisher = host, None

    def has(self, host: str, publication: Publication) -> bool:
        """Whether the shared memory of the host has exactly what was published."""
        with self.on(host):
            read = dict(SharedMemoryReader().tensors(publication))
        return torch.equal(read["t"], weights(publication.version.step))

    def damage(self, host: str, publication: Publication) -> None:
        with self.on(host), open(segment_at(publication.location), "r+b") as segment:
            segment.write(b"damaged")

    def inode(self, host: str, publication: Publication) -> int:
        with self.on(host):
            return segment_at(publication.location).stat().st_ino

    def on(self, host: str) -> _On:
        """A block in which this process is on that host, as far as files are concerned."""
        return _On(self._owners[host].pid)

    def _spawn(self, host: str) -> Any:
        return self.spawn(host, host, SpiedRelay, host)


class _On:
    def __init__(self, owner: int) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        os.environ[OWNER] = str(self._owner)

    def __exit__(self, *error: object) -> None:
        del os.environ[OWNER]


def weights(step: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step))
