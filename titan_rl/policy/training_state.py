"""The trainer's part of a checkpoint: weights, moments, schedule and reference policy, whatever the layout of ranks.

torch's distributed checkpoint stores each rank's shards under global names. Ranks of any other number and layout read
the same values, bit for bit; the float32 master weights are what is stored.

To read a state runs nothing that its files say: torch unpickles both the metadata and the plain values, here with an
allow-list of names.

    begin   every rank copies its state in memory, then training goes on       (collective, in the trainer's thread)
    finish  wait until the copies are on disk                                  (another thread; a group of its own)
"""

import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from titan_rl.errors import CheckpointError, StorageError

_ANY_ERROR = (Exception, CheckpointException)
"""torch's own is no Exception, so an actor would take it for its end."""

WEIGHTS, MOMENTS, REFERENCE, CRITIC = "model.", "optimizer.", "reference.", "critic."
"""What the names of a state's parts begin with. Hugging Face names follow, those of the moments are torch's."""

BASE = "base"
"""With LoRA: fingerprint of the frozen weights, and the adapters' alpha."""

_IN_METADATA = {
    "pathlib": {"PosixPath"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}
"""By module, all names that torch's metadata may refer to."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _IN_METADATA.get(module, ()):
            raise CheckpointError(f"its metadata refers to {module}.{name}, which no checkpoint of ours does")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        name = read_item.dest_index.fqn
        try:
            self.original_state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            raise CheckpointError(f"{name} is not plain data") from None


class StateWriter:
    """Writes one state at a time beside training. Making it is collective."""

    def __init__(self, device: torch.device) -> None:
        # Its collectives run beside those of training, which a group may not mix.
        self._group = dist.new_group(backend="gloo")
        # Kept with its memory: a copy into new pages takes 2 to 3 times as long. From a device it goes at the speed of
        # the link, into pinned memory, so that there is little to hide behind the next step.
        cuda = device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
        self._copies = DefaultStager(options)
        self._writing: Future[Any] | None = None

    def begin(self, state: dict[str, Any], directory: Path) -> None:
        """Copy `state` in memory and begin to write it to `directory`. Collective. Raises StorageError."""
        if self._writing is not None:
            wait([self._writing])  # only of a checkpoint that was given up
        try:
            writing = dcp.async_save(
                state,
                storage_writer=dcp.FileSystemWriter(directory, sync_files=False),  # synced with the whole checkpoint
                process_group=self._group,
                async_checkpointer_type=AsyncCheckpointerType.THREAD,
                async_stager=self._copies,
            )
        except _ANY_ERROR as error:  # the run goes on without this checkpoint
            raise StorageError(f"{directory} cannot be written: {_cause(error)}") from error
        assert isinstance(writing, Future)
        self._writing = writing

    def finish(self) -> None:
        """Wait until the state is written, in any thread. Raises StorageError if it could not be."""
        assert self._writing is not None
        try:
            self._writing.result()
        except _ANY_ERROR as error:  # whatever it is, the checkpoint is not there
            raise StorageError(f"the trainer's state could not be written: {_cause(error)}") from error


def part_of(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """One part of a state, by its own names."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def read_state(state: dict[str, Any], directory: Path) -> None:
    """Fill the tensors of `state` in place, and replace its other values. Collective. Raises CheckpointError if
    `directory` lacks something that `state` has, or has another shape of it."""
    try:
        dcp.load(state, storage_reader=_Reader(directory), planner=_LoadPlanner())
    except _ANY_ERROR as error:
        raise CheckpointError(f"{directory} cannot be read: {_cause(error)}") from error


def read_tensors(directory: Path, part: str) -> dict[str, Tensor]:
    """The whole tensors of a part of a state ("": of all parts) by their own names, in a process without
    torch.distributed; weights are float32. Raises CheckpointError."""
    try:
        stored = _Reader(directory).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if name.startswith(part) and isinstance(entry, TensorStorageMetadata)
        }
    except _ANY_ERROR as error:
        raise CheckpointError(f"{directory} cannot be read: {_cause(error)}") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
        read_state(tensors, directory)
    return part_of(tensors, part)


def _cause(error: BaseException) -> str:
    """The first rank's own error: torch wraps them by rank."""
    failures = getattr(error, "failures", None)
    inner = next(iter(failures.values()))[0] if failures else error
    return f"{type(inner).__name__}: {inner}"
