"""The trainer's part of a checkpoint: weights, moments, schedule and reference policy, whatever the layout of ranks.

Each rank writes the boxes that it holds of each tensor to a file of its own, a replica's once. Ranks of any other
number and layout read what overlaps with theirs: the same values, bit for bit; the float32 master weights are what is
stored. Files hold names and numbers, so to read a state runs nothing that they say.

    begin   the rank copies its state in memory, then training goes on         (in the trainer's thread)
    finish  wait until the copy is on disk                                     (in any thread)
"""

import operator
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from titan_rl.errors import CheckpointError, StorageError, WeightsError
from titan_rl.weights.manifest import TensorShard
from titan_rl.weights.tensor_files import shards_of_files, write_shards

WEIGHTS, MOMENTS, REFERENCE, CRITIC = "model.", "optimizer.", "reference.", "critic."
"""What the names of a state's parts begin with. Hugging Face names follow, those of the moments are torch's."""


class StateWriter:
    """Writes one state at a time beside training."""

    def __init__(self, rank: int) -> None:
        self._file = f"rank-{rank}.safetensors"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copies: list[Tensor] = []
        self._writing: Future[None] | None = None

    def begin(self, shards: Sequence[TensorShard], directory: Path) -> None:
        """Copy this rank's shards in memory and begin to write them to `directory`. Raises StorageError: there is no
        room for the copy."""
        if self._writing is not None:
            wait([self._writing])  # only of a checkpoint that was given up
        shards = [shard for shard in shards if shard.counted]
        live = [shard.data.detach() for shard in shards]
        # From a device it goes at the speed of the link, into pinned memory.
        cuda = any(tensor.is_cuda for tensor in live)
        if [tensor.shape for tensor in live] != [tensor.shape for tensor in self._copies]:
            # Kept with its memory: a copy into new pages takes 2 to 3 times as long.
            try:
                self._copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=cuda) for each in live]
            except RuntimeError as error:
                raise StorageError(f"no memory for a copy of the state: {error}") from error
        torch._foreach_copy_(self._copies, live, non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize()
        copies = [replace(shard, data=copy) for shard, copy in zip(shards, self._copies, strict=True)]
        self._writing = self._thread.submit(write_shards, directory / self._file, copies)  # synced with the checkpoint

    def finish(self) -> None:
        """Wait until the state is written, in any thread. Raises StorageError if it could not be."""
        if self._writing is None:
            raise StorageError("the trainer was replaced before its state was written")
        self._writing.result()


def read_state(shards: Sequence[TensorShard], directory: Path) -> None:
    """Overwrite these shards. Raises CheckpointError if `directory` lacks something of them, or has another shape of
    it; some are changed then."""
    stored = _boxes(directory)
    for shard in shards:
        left = shard.data.numel()
        for offset, box in stored.get(shard.name, {}).items():
            if box.global_shape != shard.global_shape:
                raise CheckpointError(f"{directory}: {shard.name} is {box.global_shape}, not {shard.global_shape}")
            begin = list(map(max, offset, shard.offset))
            end = [min(mine.stop, theirs.stop) for mine, theirs in zip(shard.slices, box.slices, strict=True)]
            if all(map(operator.lt, begin, end)):
                mine = _cut(shard, begin, end)
                mine.copy_(_cut(box, begin, end))
                left -= mine.numel()
        if left:
            raise CheckpointError(f"{directory} cannot be read: it lacks {left} elements of {shard.name}")


def read_tensors(directory: Path, part: str) -> dict[str, Tensor]:
    """The whole tensors of a part of a state ("": of all parts) by their own names; weights are float32. Raises
    CheckpointError."""
    shards = []
    for name, boxes in _boxes(directory).items():
        if name.startswith(part):
            box = next(iter(boxes.values()))
            shards.append(TensorShard.whole(name, torch.empty(box.global_shape, dtype=box.data.dtype)))
    read_state(shards, directory)
    return {shard.name.removeprefix(part): shard.data for shard in shards}


def _cut(shard: TensorShard, begin: Sequence[int], end: Sequence[int]) -> Tensor:
    """A box of the whole tensor, which lies within the shard."""
    places = zip(begin, end, shard.offset, strict=True)
    return shard.data.detach()[tuple(slice(first - at, last - at) for first, last, at in places)]


def _boxes(directory: Path) -> dict[str, dict[tuple[int, ...], TensorShard]]:
    """By name and offset: what several ranks hold as a whole is there as often."""
    found: dict[str, dict[tuple[int, ...], TensorShard]] = {}
    try:
        for box in shards_of_files(directory):
            found.setdefault(box.name, {})[box.offset] = box
    except WeightsError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    return found
