"""How whole tensors come into the boxes that a rank holds on a device, which has no memory here ("meta") (10 s)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan_rl.weights.manifest import TensorShard


class Queued(TorchDispatchMode):
    """Names of operators, with the shape and the device of what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, tuple[int, ...], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            source = args[1] if len(args) > 1 else args[0]
            self.operators.append((func.overloadpacket.__name__, tuple(source.shape), source.device.type))
        return func(*args, **(kwargs or {}))


def test_boxes_of_rows_come_alone_and_boxes_of_columns_are_cut_out_on_the_device() -> None:
    """Nothing is put together on the host first."""
    from titan_rl.generation.vllm import weights

    whole = {name: torch.randn(8, 6).bfloat16() for name in ("rows", "columns", "not served")}
    served = [
        TensorShard(
            name=name, data=torch.empty(shape, dtype=torch.bfloat16, device="meta"), global_shape=(8, 6), offset=offset
        )
        for name, shape, offset in (
            ("rows", (4, 6), (4, 0)),
            ("columns", (8, 3), (0, 3)),
            ("not published", (8, 6), (0, 0)),
        )
    ]
    with Queued() as queued:
        weights.load(whole, served)
    assert queued.operators == [("copy_", (4, 6), "cpu"), ("_to_copy", (8, 6), "cpu"), ("copy_", (8, 3), "meta")]
