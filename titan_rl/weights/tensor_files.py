"""Tensors in `*.safetensors`: whole ones, as everybody writes them, or boxes that ranks hold, as `write_shards` does.

What is read are views of the mapped files: only what is copied out of them comes from the disk.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from titan_rl.errors import StorageError, WeightsError
from titan_rl.weights.manifest import TensorShard

_PLACES = "places"
"""In a file's header, as JSON: of each box that is not a whole tensor, the tensor's shape and the box's offset."""


def write_shards(file: Path, shards: Iterable[TensorShard]) -> None:
    """Write a new file, in a directory that is made if it is not there. Raises StorageError."""
    boxes = {shard.name: shard for shard in shards}
    parts = {name: (box.global_shape, box.offset) for name, box in boxes.items() if box.shape != box.global_shape}
    try:
        file.parent.mkdir(exist_ok=True)
        save_file({name: box.data for name, box in boxes.items()}, file, metadata={_PLACES: json.dumps(parts)})
    except Exception as error:  # the library's own error type, or an OSError
        raise StorageError(f"{file} could not be written: {error}") from error


def shards_of_files(directory: Path) -> Iterator[TensorShard]:
    """What is in all `*.safetensors` of a directory. Raises WeightsError for one that cannot be read."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as tensors:
                parts = json.loads((tensors.metadata() or {}).get(_PLACES, "{}"))
                for name in tensors.keys():
                    whole = TensorShard.whole(name, tensors.get_tensor(name))
                    shape, offset = parts.get(name, (whole.global_shape, whole.offset))
                    yield TensorShard(name=name, data=whole.data, global_shape=tuple(shape), offset=tuple(offset))
        except Exception as error:  # the library's own error type, or an OSError
            raise WeightsError(f"{file} cannot be read: {error}") from error
