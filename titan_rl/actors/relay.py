"""`WeightRelay`: brings publications into the shared memory of its host, each one once, from the relays of other hosts.

    generator ── bring(publication) ──▶ relay of its host ── open, arrived(chunk) ──▶ its parent
    generator ◀─ it is in this host's segment ── relay ◀── bytes of the chunk, past all mailboxes ── parent's segment

- The hosts are a chain in their order (several, where several hosts have a publication): each takes every chunk from
  the one before it, as soon as that has the whole of it: 1.14 times one copy for 16 hosts, by two trees 1.23.
- On a host where the trainer wrote a publication (`Publication.hosts`) a relay brings nothing and hands on what is
  there. If a parent is gone or late, the rest of its chunks comes from such a host. What is here is not fetched again.
- A slot is written again only for a publication that was made later in the same place (`Publication.serial`). Before
  the trainer could make that one, the former was released: no generator needs it any more. A late pull, or a
  child of this relay, may still read it: it gets bytes of both publications, and its verification refuses them. A
  publication older than the one in the slot is refused.
- A new file gets its name when it is whole, so a relay that dies leaves none that is half new under a name that
  generators read. The relay after it makes new files.
- A read that was given up may still write. So a chunk is read into a buffer, which is not used again then, and copied
  from there.
"""

import asyncio
import logging
import math
import mmap
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.rdma import RDMABuffer

from titan_rl.actors.sample_stores import PATIENCE_SECONDS, SLOWEST_BYTES_PER_SECOND
from titan_rl.errors import WeightsError
from titan_rl.metrics.timeline import timeline
from titan_rl.rpc.connection import ConnectedActor, Connection, endpoint
from titan_rl.rpc.mesh_client import MeshClient
from titan_rl.weights.manifest import Publication
from titan_rl.weights.segment_files import Identity, create_segment, identity_of, map_segment, segment_at

LEAST_CHUNK_BYTES, MOST_CHUNKS = 256 << 10, 512
"""A publication has so many chunks that the hops of a few do not count, and so few that their messages do not count."""

READS = 3
"""Chunks that are fetched from one parent at a time: while one is on the link, others are asked for and stored."""

SLOWEST_MEMORY = 200 << 20
"""A parent is late if a chunk has not come after the patience and the time that all chunks in flight take at the first
speed, or if it has not opened a publication after the patience and the time that making memory for it takes at the
second. That a parent is gone, its connection tells sooner; that its memory cannot be read any more, nothing tells."""

Relays = Mapping[str, tuple[int, Any]]
"""By host, in the same order everywhere: how often its relay was replaced, and the handle of the one that is there."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Slot:
    """A publication in a segment of this host, whole or on its way."""

    publication: Publication
    file: Path
    """The segment; under another name than the publication's until it is whole for the first time."""
    identity: Identity
    memory: mmap.mmap
    handles: list[RDMABuffer]
    """Of the chunks, for other hosts."""
    here: list[asyncio.Future[None]]
    """By chunk: done when it is here, or when it will not come."""
    bringing: asyncio.Task[None] | None = None

    @property
    def chunk_bytes(self) -> int:
        """The same on every host."""
        return max(LEAST_CHUNK_BYTES, -(-self.publication.manifest.nbytes // MOST_CHUNKS))

    def chunk(self, index: int) -> slice:
        start = index * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.publication.manifest.nbytes))

    def fail(self, error: Exception) -> None:
        """What is not here will not come."""
        for future in self.here:
            if not future.done():
                future.set_exception(error)
                future.exception()  # somebody may have waited, or nobody


class WeightRelay(ConnectedActor):
    """One per host. Other relays call `open` and `arrived`."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._relays: dict[str, tuple[int, Connection]] = {}
        self._slots: dict[str, _Slot] = {}  # by location
        self._preparing = asyncio.Lock()
        self._buffers: dict[int, list[memoryview]] = {}  # by size: registered once, and in no read that was given up

    @endpoint
    async def setup(self, relays: Relays) -> int:
        timeline.follow(lambda: "weights")
        await WeightRelay.set_peers.answer(self, relays)
        return os.getpid()

    @endpoint
    async def set_peers(self, relays: Relays) -> None:
        before, self._relays = self._relays, {}
        for host, (replacements, relay) in relays.items():
            known, connection = before.pop(host, (replacements, None))
            connection = connection or Connection(relay, what=f"{{}} of the relay on {host}")
            if known != replacements:
                connection.replace(relay)
            self._relays[host] = replacements, connection
        for host, (_, connection) in before.items():
            connection.lose(f"{host} has left")

    @endpoint
    async def bring(self, publication: Publication) -> None:
        """Returns when this host has the whole publication in its shared memory. Callers share one transfer. Raises
        WeightsError: it is gone, or no host that has it answers; StorageError: there is no room for it."""
        if self._host in publication.hosts:
            return
        slot = await self._slot_of(publication)
        task = self._transfer(slot)
        await asyncio.wait({task})
        if task.cancelled():
            raise WeightsError(f"{publication} is gone")
        task.result()

    @endpoint
    async def open(self, publication: Publication) -> list[RDMABuffer]:
        """Let another relay read this, which comes here too. Returns a handle on each chunk, for when it is here."""
        slot = await self._slot_of(publication)
        if self._host not in publication.hosts:
            self._transfer(slot)
        return slot.handles

    @endpoint
    async def arrived(self, serial: int, chunk: int) -> None:
        """Returns when a chunk of this opened publication is here. Raises WeightsError if it will not come."""
        slot = next((each for each in self._slots.values() if each.publication.serial == serial), None)
        if slot is None:
            raise WeightsError("it is gone: a later publication has its place")
        await asyncio.wait({slot.here[chunk]})
        slot.here[chunk].result()

    async def _slot_of(self, publication: Publication) -> _Slot:
        async with self._preparing:
            before = self._slots.get(publication.location)
            if before is not None:
                if before.publication == publication:
                    return before
                if before.publication.serial > publication.serial:
                    raise WeightsError(f"{publication} is gone: on {self._host} {before.publication} has its place")
                before.fail(WeightsError(f"{before.publication} is gone: a later publication has its place"))
                if before.bringing is not None:
                    before.bringing.cancel()
            slot = await asyncio.to_thread(self._prepare, publication, before)
            self._slots[publication.location] = slot
            loop = asyncio.get_running_loop()
            slot.here = [loop.create_future() for _ in slot.handles]
            if self._host in publication.hosts:
                for future in slot.here:
                    future.set_result(None)
            return slot

    def _prepare(self, publication: Publication, before: _Slot | None) -> _Slot:
        """Memory for it, if possible that of the one before. In a thread: Monarch registers none in an event loop."""
        nbytes, file = publication.manifest.nbytes, segment_at(publication.location)
        brings = self._host not in publication.hosts
        if (
            before is not None
            and before.publication.manifest.nbytes == nbytes
            and (brings or before.file == file)
            and _is_at(before.file, before.identity)
        ):
            return _Slot(publication, before.file, before.identity, before.memory, before.handles, [])
        if brings:
            file = _unfinished(file)
            create_segment(file, max(nbytes, 1))
        try:
            memory, identity = map_segment(file)
        except FileNotFoundError as error:
            raise WeightsError(f"{publication} is gone: there is no {file}") from error
        if len(memory) < nbytes:
            raise WeightsError(f"{publication}: {file} holds {len(memory)} bytes, its manifest says {nbytes}")
        slot, view = _Slot(publication, file, identity, memory, [], []), memoryview(memory)
        slot.handles = [RDMABuffer(view[slot.chunk(chunk)]) for chunk in range(math.ceil(nbytes / slot.chunk_bytes))]
        for handle in before.handles if before is not None else ():
            handle.drop()
        return slot

    def _transfer(self, slot: _Slot) -> asyncio.Task[None]:
        """The task that fetches what is missing; begun here unless it is under way or done."""
        task = slot.bringing
        if task is not None and (not task.done() or not (task.cancelled() or task.exception())):
            return task
        loop = asyncio.get_running_loop()
        for chunk, future in enumerate(slot.here):
            if future.done() and future.exception():
                slot.here[chunk] = loop.create_future()
        slot.bringing = loop.create_task(self._bring(slot))
        slot.bringing.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may have waited
        return slot.bringing

    async def _bring(self, slot: _Slot) -> None:
        try:
            sources = [host for host in slot.publication.hosts if host in self._relays]
            if not sources:
                raise WeightsError(f"{slot.publication} is on no host that is left")
            # each source begins a chain, which receivers join in turn
            receivers = [host for host in self._relays if host not in sources]
            parent = [*sources, *receivers][receivers.index(self._host)]
            await self._fetch_from_any(slot, dict.fromkeys((parent, *sources)))
            if slot.file != (final := segment_at(slot.publication.location)):
                os.replace(slot.file, final)
                slot.file = final
        except Exception as error:
            slot.fail(error)
            raise

    async def _fetch_from_any(self, slot: _Slot, holders: Iterable[str]) -> None:
        """Fetch what is missing from the first of these hosts, and what that one does not give from the next."""
        reasons = []
        for holder in holders:
            try:
                await self._fetch(slot, holder)
                return
            except Exception as error:  # whatever is raised about a process that is gone
                causes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
                reasons.append(f"{holder}: {type(causes[0]).__name__}: {str(causes[0]).partition(chr(10))[0]}")
                _log.warning("%s does not come from %s", slot.publication, reasons[-1])
        raise WeightsError(f"{slot.publication} did not come to {self._host}: {'; '.join(reasons)}")

    async def _fetch(self, slot: _Slot, holder: str) -> None:
        """Fetch what is missing from this host, some chunks at a time."""
        if holder not in self._relays:
            raise WeightsError("there is no such host")
        relay = self._relays[holder][1]
        opening = PATIENCE_SECONDS + slot.publication.manifest.nbytes // SLOWEST_MEMORY
        handles = await relay.call(opening, WeightRelay.open, slot.publication)
        seconds = PATIENCE_SECONDS + READS * slot.chunk_bytes // SLOWEST_BYTES_PER_SECOND
        missing = deque(index for index, here in enumerate(slot.here) if not here.done())
        kept = self._buffers.setdefault(slot.chunk_bytes, [])

        async def fetch() -> None:
            buffer = kept.pop() if kept else memoryview(bytearray(slot.chunk_bytes))
            while missing:
                index = missing.popleft()
                await relay.call(seconds, WeightRelay.arrived, slot.publication.serial, index)
                chunk = slot.chunk(index)
                async with asyncio.timeout(seconds):
                    await handles[index].read_into(buffer, timeout=seconds)
                if slot.here[index].done():  # it will not come any more: the memory is another publication's
                    break
                slot.memory[chunk] = buffer[: chunk.stop - chunk.start]
                slot.here[index].set_result(None)
            kept.append(buffer)

        async with asyncio.TaskGroup() as tasks:
            gone = tasks.create_task(relay.gone())
            await asyncio.wait([tasks.create_task(fetch()) for _ in range(READS)])
            gone.cancel()


class RelayClient(MeshClient):
    """If it is lost, what it had brought is brought again. Its segments go with all files of the host's owner."""

    actor_class = WeightRelay


def _unfinished(final: Path) -> Path:
    """A name that nobody reads and every sweep knows."""
    before, _, slot = final.name.rpartition("-")
    return final.with_name(f"{before}.part-{slot}")


def _is_at(file: Path, identity: Identity) -> bool:
    try:
        return identity_of(file) == identity
    except FileNotFoundError:
        return False
