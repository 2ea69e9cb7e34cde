"""The one interface of all transports, which one is used, and a generator rank's side of a pull.

A publisher is chosen by the config; a reader by the publication, which says where it is:

    /dev/shm/…   shared memory of this host        file:/…   a directory        rdma:…   other processes' memory
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from titan_rl.errors import WeightsError
from titan_rl.weights.config import WeightsConfig
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.verification import verify

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from titan_rl.weights.transports.publisher import ChannelPublisher


class WeightReader(Protocol):
    """Reads publications of any channel; one per generator rank and scheme."""

    def tensors(self, publication: Publication) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every entry; aliases are left out.

        Never write to them. They are good until the publication is released or the next one of its channel is read.

        Raises:
            WeightsError: the publication is gone, or shorter than its manifest says.
        """

    def close(self) -> None:
        """Let go of everything; tensors that somebody still holds keep their memory."""


def make_publisher(
    config: WeightsConfig, *, channel: str, owner_pid: int, rank: int, group: ProcessGroup | None
) -> ChannelPublisher:
    """This rank's publisher of a channel; with `rdma` an actor's context must be current.

    Args:
        channel: names the policy among those that are published; a plain word.
        owner_pid: process whose death makes files in shared memory rubbish.
        rank: of this process in `group`.
        group: the trainer's ranks; its backend must take CPU tensors. None: one rank.

    Raises:
        ConfigError: a channel that is no plain word.
    """
    common: dict[str, Any] = {"channel": channel, "rank": rank, "group": group, "max_live": config.max_live}
    match config.transport:
        case "shared_memory":
            from titan_rl.weights.transports.shared_memory import SharedMemoryPublisher

            return SharedMemoryPublisher(owner_pid=owner_pid, **common)
        case "filesystem":
            from titan_rl.weights.transports.filesystem import FilesystemPublisher

            return FilesystemPublisher(directory=Path(config.directory), **common)
        case "rdma":
            from titan_rl.weights.transports.rdma import RdmaPublisher

            return RdmaPublisher(**common)


def scheme(publication: Publication) -> str:
    """ "file", "rdma", or "" for a path in shared memory."""
    before, colon, _ = publication.location.partition(":")
    return before if colon and not before.startswith("/") else ""


def make_reader(publication: Publication) -> WeightReader:
    """A reader of publications of this one's scheme; for `rdma:` an actor's context must be current."""
    match scheme(publication):
        case "file":
            from titan_rl.weights.transports.filesystem import FilesystemReader

            return FilesystemReader()
        case "rdma":
            from titan_rl.weights.transports.rdma import RdmaReader

            return RdmaReader()
        case _:
            from titan_rl.weights.transports.shared_memory import SharedMemoryReader

            return SharedMemoryReader()


class WeightPuller:
    """Reads publications of any transport, and verifies what was loaded from them.

    Belongs to one thread. Make it where an actor's context is current, which `rdma:` publications need.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._readers: dict[str, WeightReader] = {}

    def tensors(self, publication: Publication) -> Iterator[tuple[str, Tensor]]:
        """What an engine must load to compute with this publication; see `WeightReader.tensors`."""
        where = scheme(publication)
        if where not in self._readers:
            self._readers[where] = self._context.run(make_reader, publication)
        return self._readers[where].tensors(publication)

    def verify(self, publication: Publication, served: Iterable[TensorShard], group: ProcessGroup | None) -> int:
        """See `verification.verify`. Collective. After a refusal the next pull reads everything again."""
        try:
            return verify(publication, served, group)
        except WeightsError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of everything that was read."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
