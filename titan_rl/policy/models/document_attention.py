"""Causal attention over packed documents where torchtitan's varlen kernel does not run: on CPU, and in float32.

A document attends to itself only, and gets the same bits packed or alone. Neighbours of equal length share one
batched call, so samples ordered by length (as the packing plan orders them) cost one call per distinct length.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata


class PackedDocuments(VarlenMetadata):
    """torchtitan's description of a packed row, and the same for `DocumentAttention`.

    `runs` is an attribute and not one of the tuple's fields: FSDP walks through every field's items at every layer,
    which for host offsets of hundreds of documents costs more than the attention's own Python.
    """

    runs: tuple[tuple[int, int, int], ...]
    """`(start, documents, length)` of each run of neighbouring documents of one length."""

    @classmethod
    def of(cls, offsets: tuple[int, ...], device: torch.device) -> PackedDocuments:
        """`offsets`: document boundaries, from 0 to the number of tokens."""
        lengths = [end - start for start, end in pairwise(offsets)]
        boundaries = torch.tensor(offsets, dtype=torch.int32, device=device)
        self = cls(cu_seq_q=boundaries, cu_seq_k=boundaries, max_q=max(lengths), max_k=max(lengths))
        runs, start = [], 0
        for length, group in groupby(lengths):
            count = sum(1 for _ in group)
            runs.append((start, count, length))
            start += count * length
        self.runs = tuple(runs)
        return self


class DocumentAttention(VarlenAttention):
    """`VarlenAttention` by `scaled_dot_product_attention`; a subclass, because torchtitan asks with isinstance."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(  # type: ignore[override]  # varlen's out_transform is for models with attention sinks
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: PackedDocuments,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Shapes as in torchtitan: B rows of L tokens, N heads of H channels."""
        queries, keys, values = (tensor.flatten(0, 1) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        outputs = []
        for start, count, length in attention_masks.runs:
            run = slice(start, start + count * length)
            # [count, N, length, H]: views, no copy.
            q, k, v = (x[run].unflatten(0, (count, length)).transpose(1, 2) for x in (queries, keys, values))
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.view_as(q_BLNH)
