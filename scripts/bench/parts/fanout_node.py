"""A host's relay in `fanout.py`, with what the benchmark asks of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_rl.actors import relay
from titan_rl.actors.relay import WeightRelay
from titan_rl.processes import OWNER
from titan_rl.rpc.connection import endpoint
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Manifest, Publication, TensorEntry
from titan_rl.weights.segment_files import DIRECTORY, create_segment, map_segment, segment_at, segment_location

CHANNEL = "fanout"


class Node(WeightRelay):
    def __init__(self, host: str) -> None:
        os.environ.pop(OWNER, None)  # several may share a host, each with files of its own
        relay.PATIENCE_SECONDS = 120  # slow links
        super().__init__(host)
        self._published = 0

    @endpoint
    async def set_up(self, relays: Mapping[str, tuple[int, Any]]) -> None:
        await WeightRelay.set_peers.answer(self, relays)

    @endpoint
    async def publish(self, turn: int, nbytes: int) -> Publication:
        """Random bytes, without torch; nobody loads them."""
        location = segment_location(DIRECTORY, CHANNEL, 0)
        if turn == 1:
            create_segment(segment_at(location), nbytes)
        memory, _ = map_segment(segment_at(location))
        memory[:] = _content(turn, nbytes)
        self._published += 1
        entry = TensorEntry(name="t", shape=(nbytes // 4,), dtype="float32", offset=0, nbytes=nbytes, fingerprint=0)
        publication = Publication(
            channel=CHANNEL,
            version=PolicyVersion(0, turn),
            manifest=Manifest(entries=(entry,), nbytes=nbytes),
            location=location,
            hosts=(self._host,),
        )
        return replace(publication, serial=self._published)

    @endpoint
    async def fetch(self, publication: Publication) -> None:
        await WeightRelay.bring.answer(self, publication)

    @endpoint
    async def has(self, publication: Publication) -> bool:
        content = segment_at(publication.location).read_bytes()
        return content == _content(publication.version.step, publication.manifest.nbytes)

    @endpoint
    async def sent(self) -> int:
        """Bytes that have left this host."""
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "net0":
                return int(counts.split()[8])
        raise LookupError("this host has no interface net0")


def _content(turn: int, nbytes: int) -> bytes:
    block = bytes((turn * 31 + index * 7) % 251 for index in range(4096 + turn))
    return (block * (nbytes // len(block) + 1))[:nbytes]
