"""One generator rank's side of weights: reads publications of any transport, verifies, and knows what it serves.

What is left out of a load is decided from what was verified last, and verification looks at all weights all the same.
A pull that fails at any point is followed by a complete one.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from titan_rl.errors import WeightsError
from titan_rl.weights.manifest import Manifest, Publication
from titan_rl.weights.shards import TensorShard
from titan_rl.weights.transport import WeightReader, make_reader, scheme
from titan_rl.weights.verification import verify

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class WeightPuller:
    """Belongs to one thread. Make it where an actor's context is current, which `rdma:` publications need.

    Attributes:
        skipped_bytes: of the last publication, those that were served already and were not read again.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._readers: dict[str, WeightReader] = {}
        self._verified: Manifest | None = None
        self.skipped_bytes = 0

    def tensors(self, publication: Publication) -> Iterator[tuple[str, Tensor]]:
        """What an engine must load to compute with this publication; see `WeightReader.tensors`.

        Raises:
            WeightsError: the publication cannot be read.
        """
        held, self._verified = self._verified, None  # from here on the engine may hold a mixture
        skip = _unchanged(held, publication.manifest) if publication.delta and held is not None else frozenset()
        self.skipped_bytes = sum(entry.nbytes for entry in publication.manifest.entries if entry.name in skip)
        where = scheme(publication)
        if where not in self._readers:
            self._readers[where] = self._context.run(make_reader, publication)
        return self._readers[where].tensors(publication, skip)

    def verify(self, publication: Publication, served: Iterable[TensorShard], group: ProcessGroup | None) -> int:
        """See `verification.verify`. Collective. What was refused is read from its place anew the next time."""
        try:
            fingerprint = verify(publication, served, group)
        except WeightsError:
            self.close()
            raise
        self._verified = publication.manifest
        return fingerprint

    def close(self) -> None:
        """Let go of everything that was read."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._verified = None


def _unchanged(held: Manifest, new: Manifest) -> frozenset[str]:
    """Names of the tensors that are in both, alike, with the same aliases."""
    if held.aliases != new.aliases:
        return frozenset()
    known = {(entry.name, entry.shape, entry.dtype, entry.fingerprint) for entry in held.entries}
    return frozenset(
        entry.name for entry in new.entries if (entry.name, entry.shape, entry.dtype, entry.fingerprint) in known
    )
