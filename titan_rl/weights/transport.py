"""The one interface of all transports, and which one is used.

A publisher is chosen by the config; a reader by the publication, which says where it is:

    /dev/shm/…   shared memory of this host        file:/…   a directory        rdma:…   other processes' memory
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from titan_rl.types import PolicyVersion
from titan_rl.weights.config import WeightsConfig
from titan_rl.weights.manifest import Publication
from titan_rl.weights.shards import TensorShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class WeightPublisher(Protocol):
    """One trainer rank's end of a channel. All ranks make the same calls in the same order."""

    def publish(
        self,
        version: PolicyVersion,
        shards: Iterable[TensorShard],
        *,
        dtype: torch.dtype,
        aliases: Sequence[tuple[str, str]] = (),
    ) -> Publication:
        """See `publisher.ChannelPublisher.publish`."""

    def release(self, version: PolicyVersion) -> None:
        """Nobody reads this version any more. Raises WeightsError if it is not live."""

    def close(self) -> None:
        """Give back what the transport holds."""


class WeightReader(Protocol):
    """One generator rank's end; reads publications of any channel."""

    def tensors(self, publication: Publication, skip: AbstractSet[str] = frozenset()) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor, in the dtype that is served, of every entry but those in `skip`; aliases left out.

        Never write to them. They are good until the publication is released or the next one of its channel is read.

        Raises:
            WeightsError: the publication is gone, or shorter than its manifest says.
        """

    def close(self) -> None:
        """Let go of everything; tensors that somebody still holds keep their memory."""


def make_publisher(
    config: WeightsConfig, *, channel: str, owner_pid: int, rank: int, group: ProcessGroup | None
) -> WeightPublisher:
    """This rank's publisher of a channel; with `rdma` an actor's context must be current.

    Args:
        channel: names the policy among those that are published; a plain word.
        owner_pid: process whose death makes files in shared memory rubbish.
        rank: of this process in `group`.
        group: the trainer's ranks; its backend must take CPU tensors. None: one rank.

    Raises:
        ConfigError: a channel that is no plain word.
    """
    transfer_dtype = None if config.transfer_dtype == "same" else getattr(torch, config.transfer_dtype)
    match config.transport:
        case "shared_memory":
            from titan_rl.weights.transports.shared_memory import SharedMemoryPublisher

            return SharedMemoryPublisher(
                channel=channel,
                owner_pid=owner_pid,
                rank=rank,
                group=group,
                max_live=config.max_live,
                transfer_dtype=transfer_dtype,
                delta=config.delta,
            )
        case "filesystem":
            from titan_rl.weights.transports.filesystem import FilesystemPublisher

            return FilesystemPublisher(
                channel=channel,
                directory=Path(config.directory),
                rank=rank,
                group=group,
                max_live=config.max_live,
                transfer_dtype=transfer_dtype,
                delta=config.delta,
            )
        case "rdma":
            from titan_rl.weights.transports.rdma import RdmaPublisher

            return RdmaPublisher(
                channel=channel,
                rank=rank,
                group=group,
                max_live=config.max_live,
                transfer_dtype=transfer_dtype,
                delta=config.delta,
            )


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
