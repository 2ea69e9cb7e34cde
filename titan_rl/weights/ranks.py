"""Collectives of a mesh's ranks on small values. A failure on one rank becomes an error on every rank, so that no rank
waits in a collective for one that raised."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.errors import WeightsError

T = TypeVar("T")


class Ranks:
    """The ranks of a process group whose backend takes CPU tensors, or this process alone (`group` None).

    Every method is collective: all ranks call the same ones in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None

    def add(self, values: Tensor) -> None:
        """Replace `values` by their sum over the ranks; int64: modulo 2**64."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)

    def maximum(self, values: Tensor) -> None:
        """Replace `values` by their maxima over the ranks."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group, op=dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        flags = torch.tensor([flag], dtype=torch.int64)
        self.maximum(flags)
        return bool(flags.tolist()[0])

    def gather(self, value: T) -> list[T]:
        """The value of every rank, by rank. Pickles; not for tensors."""
        if self._group is None:
            return [value]
        values: list[T | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank; that of other ranks is not looked at. Pickles."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]  # type: ignore[return-value]

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Do this rank's part of `what`, which is not collective; returns when every rank has done its part. Raises
        WeightsError on every rank if a part failed on any."""
        result: T
        cause: Exception | None = None
        reason = ""
        try:
            result = work()
        except Exception as error:
            cause, reason = error, str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
        if self.any(cause is not None):
            reasons = self.gather(reason)
            by_rank = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
            raise WeightsError(f"{what}: {'; '.join(by_rank) if len(reasons) > 1 else reasons[0]}") from cause
        return result
