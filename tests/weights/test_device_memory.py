"""How weights leave a device's memory and come into it, with CPU tensors in its place: what is queued, how many bytes
cross, and how often it is waited for (3 s)."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from weight_examples import copied, publisher_in, same_bytes, weights, whole_shards

from titan_rl.errors import StorageError, WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights import fingerprint, publisher
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.puller import SharedMemoryReader, verify
from titan_rl.weights.segment_files import create_segment, map_tensor

V1 = PolicyVersion(0, 1)
ROWS, COLUMNS = 3000, 2048
READS = ("_local_scalar_dense", "nonzero", "equal")
"""Operators that wait for a device."""


class Queued(TorchDispatchMode):
    """What would be launched on a device, in order, with the bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, list[torch.dtype], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in tree_leaves((args, result)) if isinstance(each, Tensor)]
            touched = sum(each.nbytes for each in tensors)
            self.operators.append((func.overloadpacket.__name__, [each.dtype for each in tensors], touched))
        return result

    @property
    def names(self) -> Counter[str]:
        return Counter(name for name, *_ in self.operators)

    @property
    def bytes(self) -> int:
        return sum(touched for *_, touched in self.operators)


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go the way of CUDA's."""
    monkeypatch.setitem(publisher._WAYS, "cpu", publisher._WAYS["cuda"])
    monkeypatch.setattr(fingerprint, "_sum_on_host", fingerprint._sum_on_device)


@pytest.fixture
def publication(tmp_path: Path) -> Iterator[Publication]:
    """One matrix of bfloat16, as the CPU publishes it."""
    matrix = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    yield publisher_in(tmp_path).publish(V1, whole_shards({"a": matrix}), dtype=torch.bfloat16)
    gc.collect()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [100, 256 << 20])
def test_what_a_device_publishes_is_what_the_cpu_publishes(
    as_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype, chunk_bytes: int
) -> None:
    """Boxes of columns, of rows and scalars, in chunks."""
    whole = weights(1) | {"by_columns": torch.randn(40, 3000), "scalar": torch.tensor(2.5)}
    left = TensorShard(name="by_columns", data=whole["by_columns"][:, :1100], global_shape=(40, 3000), offset=(0, 0))
    right = TensorShard(
        name="by_columns", data=whole["by_columns"][:, 1100:], global_shape=(40, 3000), offset=(0, 1100)
    )
    rest = [shard for shard in whole_shards(whole) if shard.name != "by_columns"]
    (tmp_path / "device").mkdir()
    monkeypatch.setitem(publisher._WAYS, "cpu", (chunk_bytes, publisher._WAYS["cuda"][1]))
    device = publisher_in(tmp_path / "device").publish(V1, [left, *rest, right], dtype=dtype)
    monkeypatch.undo()
    host = publisher_in(tmp_path).publish(V1, whole_shards(whole), dtype=dtype)
    assert device.manifest == host.manifest
    assert same_bytes(copied(SharedMemoryReader().tensors(device)), copied(SharedMemoryReader().tensors(host)))


def test_a_publication_sends_each_tensor_once_in_the_served_dtype_and_is_read_once(
    as_device: None, tmp_path: Path
) -> None:
    """In pieces of 1 MiB it took 24 blocking copies of 4 bytes per element, and as many sums on the host."""
    matrix = torch.randn(ROWS, COLUMNS)
    tensors = {"a": matrix, "b": matrix + 1}
    target = publisher_in(tmp_path)
    with Queued() as queued:
        target.publish(V1, whole_shards(tensors), dtype=torch.bfloat16)
    names = [name for name, *_ in queued.operators]
    copies = [at for at, name in enumerate(names) if name == "copy_"]
    assert [queued.operators[at][1][:2] for at in copies] == [[torch.bfloat16] * 2] * 2
    assert [queued.operators[at][2] for at in copies] == [3 * 2 * matrix.numel()] * 2  # in, out and the result
    assert not {*names[copies[0] :]} & {*READS}
    assert (
        names.count("stack") == 2 and "copy_" not in names[names.index("stack") :]
    )  # of the sums, and with their sizes


@pytest.mark.parametrize("first", [0, 1536])
def test_verification_takes_34_bytes_per_element_and_one_read(
    as_device: None, publication: Publication, first: int
) -> None:
    """It took 354 bytes in 45 launches and 1 GiB of memory for each 16 Mi elements, and a read for each tensor."""
    whole = dict(SharedMemoryReader().tensors(publication))["a"]
    served = [
        TensorShard(name="a", data=whole[:, columns].clone(), global_shape=whole.shape, offset=(0, columns.start or 0))
        for columns in (slice(first), slice(first, None))
    ]
    verify(publication, served, None)  # layers share their keys
    with Queued() as queued:
        verify(publication, served, None)
    assert queued.bytes < 35 * whole.numel()
    assert len(queued.operators) < 100 and not queued.names.keys() & {*READS}
    served[1].data.view(torch.int16)[7, 7] ^= 1
    with pytest.raises(WeightsError, match="a is not what was published"):
        verify(publication, served, None)


def test_a_mapping_is_locked_for_cuda_until_its_last_view_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    def lock(address: int, nbytes: int, flags: int) -> SimpleNamespace:
        calls.append(("lock", nbytes))
        return SimpleNamespace(value=2 if nbytes > 8192 else 0)

    def unlock(address: int) -> None:
        assert str(file) in Path("/proc/self/maps").read_text()
        calls.append(("unlock", address))

    file = tmp_path / "segment"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=unlock)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    create_segment(file, 8192)
    view = map_tensor(file)[0][5:].view(torch.uint8)
    address = view.data_ptr() - 5
    gc.collect()
    assert calls == [("lock", 8192)]
    del view
    assert calls[1:] == [("unlock", address)]
    map_tensor(file, page_lock=False)
    assert len(calls) == 2
    create_segment(file, 16384)
    with pytest.raises(StorageError, match="CUDA cannot lock the 0 MiB"):
        map_tensor(file)
