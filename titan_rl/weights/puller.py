"""A generator rank's end of a publication: read it, and verify that the engine computes with it.

Weights are served only after `verify`. It reads the memory that the engine's layers use after the load, so it finds a
skipped tensor, a stale copy of a tied one, or a byte damaged on the way.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.weights.adapters import adapted
from titan_rl.weights.fingerprint import combined_fingerprint, shard_sum, signed, sums_by_name
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.ranks import Ranks
from titan_rl.weights.segment_files import Identity, identity_of, map_tensor, segment_at
from titan_rl.weights.tensor_files import shards_of_files, write_shards

_NAMED = 6
"""Problems that an error names; the rest is counted."""


class SharedMemoryReader:
    """Zero-copy views of what was published on this host, on any channel. Belongs to one thread. `base`: the checkpoint
    directory that adapters were trained on; its tensors stay mapped once they are needed. `device`: where effective
    weights are computed. `page_lock`: see `map_tensor`."""

    def __init__(self, base: Path | None = None, device: str = "cpu", *, page_lock: bool = True) -> None:
        self._page_lock = page_lock
        self._directory = base
        self._base: dict[str, TensorShard] = {}
        self._device = device
        self._mapped: dict[Path, tuple[Tensor, Identity]] = {}  # the bytes [N] uint8, and of which file

    def tensors(self, publication: Publication) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every entry; aliases are left out.

        They are views of the publication itself: never write to them. They are good until it is released or the next
        one of its channel is read. Raises WeightsError at once, if it is gone or shorter than its manifest says.
        """
        content = self._content(publication)
        return ((entry.name, entry.view(content)) for entry in publication.manifest.entries)

    def served(self, publication: Publication) -> Iterator[tuple[str, Any]]:
        """As `tensors`, of the weights that engines compute with: of those that LoRA adapts, an `AdaptedTensor`. What
        the base lacks is missing."""
        stored, served = self.tensors(publication), publication.manifest.served
        if not served:
            yield from stored
            return
        if not self._base and self._directory is not None:
            self._base = {shard.name: shard for shard in shards_of_files(self._directory)}
        adapters = dict(stored)
        for entry in served:
            if (base := self._base.get(entry.name)) is not None:
                yield entry.name, adapted(base, adapters, getattr(torch, entry.dtype), self._device)

    def _content(self, publication: Publication) -> Tensor:
        path = segment_at(publication.location)
        content, identity = self._mapped.get(path, (None, None))
        try:
            if content is None or identity != identity_of(path):
                # A name with another file behind it: the publisher was started again, or needed more room.
                self._mapped = {name: kept for name, kept in self._mapped.items() if name.exists()}
                content, identity = self._mapped[path] = map_tensor(path, page_lock=self._page_lock)
        except FileNotFoundError as error:
            raise WeightsError(f"{publication} is gone: there is no {path}") from error
        if content.numel() < publication.manifest.nbytes:
            raise WeightsError(
                f"{publication}: {path} holds {content.numel()} bytes, its manifest says {publication.manifest.nbytes}"
            )
        return content


def save_publication(publication: Publication, directory: Path) -> None:
    """Write a live publication to a new directory, for `shards_of_files`. Raises WeightsError if it is gone or is not
    as it was published, StorageError if it cannot be written."""
    shards = [TensorShard.whole(*each) for each in SharedMemoryReader(page_lock=False).tensors(publication)]
    for entry, shard in zip(publication.manifest.entries, shards, strict=True):
        if shard_sum(shard.data, shard.global_shape, shard.offset) != entry.fingerprint:
            raise WeightsError(f"{publication}: {entry.name} is not what was published")
    write_shards(directory / "model.safetensors", shards)


def verify(publication: Publication, served: Iterable[TensorShard], group: dist.ProcessGroup | None) -> int:
    """Compare what the engine serves with the manifest. Collective over `group`, as in `Ranks`. Returns the combined
    fingerprint of the version: the same for every generator that serves it. Raises WeightsError on every rank, naming
    the version and the tensors: missing, extra, of another dtype or shape, or not what was published.

    `served`: this rank's views of the weights that its engine computes with, aliases under their own names. They are
    summed over the ranks. A tensor of which ranks hold replicas, each element as often as the others, must sum to as
    many times its fingerprint.
    """
    ranks = Ranks(group)
    expected = publication.manifest.expected
    what = f"{publication} is not what the engine computes with"
    problems: list[str] = []

    def parts() -> Iterator[tuple[str, Tensor, int]]:
        for shard in served:
            dtype, shape = str(shard.data.dtype).removeprefix("torch."), tuple(shard.global_shape)
            if (entry := expected.get(shard.name)) is None:
                problems.append(f"{shard.name} was never published")
            elif (dtype, shape) != (entry.dtype, entry.shape):
                problems.append(f"{shard.name} is {dtype} {shape}, published as {entry.dtype} {entry.shape}")
            else:
                yield shard.name, shard_sum(shard.data, shape, shard.offset), shard.data.numel()

    sums = ranks.together(what, lambda: sums_by_name(expected, parts()))
    ranks.add(sums)
    everyones = ranks.gather(problems) if ranks.any(bool(problems)) else []
    found = [f"{each} (rank {rank})" for rank, theirs in enumerate(everyones) for each in theirs]
    for (name, entry), fingerprint, elements in zip(expected.items(), *sums.tolist(), strict=True):
        size = math.prod(entry.shape)
        copies, rest = divmod(elements, max(size, 1))
        if rest or size > elements:
            found.append(f"{name} is missing" if not elements else f"{name} has {elements} of {size} elements")
        elif fingerprint != signed(copies * entry.fingerprint):
            found.append(f"{name} is not what was published")
    if found:
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise WeightsError(f"{what}: {'; '.join(found[:_NAMED])}{more}")
    return combined_fingerprint(publication.manifest)
