"""Which box of a global tensor this rank holds, for FSDP, tensor parallelism and both.

FSDP cuts what tensor parallelism left of a dimension, both as torch.chunk does (all chunks equal but the last ones,
which may be shorter or empty). So every rank's part is one box. Replicas count once: on the rank that comes first on
every mesh axis the tensor is replicated over.
"""

from __future__ import annotations

import math

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_rl.errors import WeightsError
from titan_rl.weights.manifest import TensorShard


def local_shard(name: str, tensor: DTensor) -> TensorShard:
    """The box of `tensor` on this rank, a view of its live storage and possibly empty; raises WeightsError for a layout
    that this module does not know.

    torch's own `compute_local_shape_and_global_offset` is not used: for an uneven dimension that FSDP and tensor
    parallelism both cut, it gives the layout of a strided redistribution, which is not where FSDP put the data.
    """
    mesh, data = tensor.device_mesh, tensor.to_local()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WeightsError(f"{name}: this rank is not part of the mesh that holds it")
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    counted = True
    axes = list(zip(tensor.placements, range(mesh.ndim), strict=True))
    # A strided shard is FSDP's mark on a dimension that tensor parallelism had cut before.
    for placement, axis in sorted(axes, key=lambda entry: isinstance(entry[0], _StridedShard)):
        if isinstance(placement, Replicate):
            counted = counted and coordinate[axis] == 0
        elif isinstance(placement, (Shard, _StridedShard)):
            size = shape[placement.dim]
            chunk = math.ceil(size / mesh.size(axis))
            start = min(coordinate[axis] * chunk, size)
            offset[placement.dim] += start
            shape[placement.dim] = min(chunk, size - start)
        else:
            raise WeightsError(f"{name}: weights are not expected to be {placement}")
    if tuple(shape) != tuple(data.shape):
        raise WeightsError(f"{name}: this rank holds {tuple(data.shape)} of {tuple(tensor.shape)}, expected {shape}")
    return TensorShard(name=name, data=data, global_shape=tuple(tensor.shape), offset=tuple(offset), counted=counted)
