"""Actors of test_rdma_ranks.py: two trainer ranks, and a generator rank in a process of its own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from monarch.actor import Actor, current_rank
from transport_examples import Engine, copied, same_bytes
from transport_scenarios import CUT_SHAPES, die_publishing, parallelism_pairs, policy, publish_first

from titan_rl.actors.connection import served
from titan_rl.errors import WeightsError
from titan_rl.processes import join_world
from titan_rl.weights.manifest import Publication
from titan_rl.weights.publisher import ChannelPublisher
from titan_rl.weights.puller import WeightPuller
from titan_rl.weights.rdma import RdmaReader

T = TypeVar("T")


class InOneThread(Actor):
    """Works as trainer and generator ranks do: in one thread beside the event loop, in this actor's context."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def run(self, work: Callable[[], T]) -> T:
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: context.run(work))


class Writer(InOneThread):
    def __init__(self) -> None:
        super().__init__()
        self._rank = int(current_rank().rank)
        self._publisher: ChannelPublisher | None = None

    @served
    async def join(self) -> None:
        def join() -> None:
            torch.set_num_threads(1)
            join_world("gloo")

        await self.run(join)

    @served
    async def pairs(self) -> dict[str, bool]:
        return await self.run(lambda: parallelism_pairs("rdma", self._rank, Path()))

    @served
    async def publish_first(self) -> Publication:
        def publish() -> Publication:
            self._publisher, first = publish_first("rdma", self._rank, Path())
            return first

        return await self.run(publish)

    @served
    async def die_publishing(self) -> dict[str, str]:
        """The call of rank 1 never returns."""
        publisher = self._publisher
        assert publisher is not None
        return await self.run(lambda: die_publishing(publisher, self._rank))


class Reader(InOneThread):
    def __init__(self) -> None:
        super().__init__()
        self._puller = WeightPuller()

    @served
    async def pull(self, publication: Publication, step: int) -> bool:
        """Whether all bytes of a step's policy came, and were verified as loaded."""

        def pull() -> bool:
            engine = Engine(shapes=CUT_SHAPES)
            engine.load(self._puller.tensors(publication))
            self._puller.verify(publication, engine.served_shards(), None)
            return same_bytes(copied(self._puller.tensors(publication)), policy(step))

        return await self.run(pull)


class LateReader(InOneThread):
    @served
    async def error(self, publication: Publication) -> str:
        """Of reading what was never read here."""

        def read() -> str:
            try:
                RdmaReader(patience_seconds=2).tensors(publication)
            except WeightsError as error:
                return str(error)
            return ""

        return await self.run(read)
