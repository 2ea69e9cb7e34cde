"""A checkpoint directory as a torchtitan model, sharded by torchtitan's own parallelise function.

Built on the meta device, then sharded (tensor parallelism where configured; FSDP2, which also applies the compute
dtype, unless one rank computes in float32); `checkpoint` fills it. Every Hugging Face tensor is exactly one torchtitan
tensor, so names translate and layouts do not. Qwen3's functions shard every family: Llama's know fewer parts, and never
leave FSDP out.

`DocumentAttention` computes causal attention over packed documents where torchtitan's varlen kernel does not run: on
CPU, and in float32. A document attends to itself only, and gets the same bits whatever other groups are packed beside
it. A prompt that it shares with its own group is computed once, and rounds otherwise than alone. `pack` makes documents
of one shape neighbours, which share one batched call.

Import this module only after `titan_adaptation.choose_device`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torchtitan.components.lora import LoRAConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from titan_rl.errors import ConfigError, TrainingError
from titan_rl.policy.config import LoraConfig, LoraTarget, TrainerConfig
from titan_rl.policy.microbatch import MicroBatch, Run
from titan_rl.policy.models.architecture import Architecture, read_shape
from titan_rl.policy.models.experts import Experts
from titan_rl.policy.models.titan_adaptation import reduce_gradients_by_plain_sums, share_padding_of_tied_shards
from titan_rl.policy.token_scores import token_scores
from titan_rl.support import Supports
from titan_rl.weights.adapters import adapter_names

SPMD_BACKEND = "partial_dtensor"
"""torchtitan's default, spmd_types, fails on two or more ranks of torch 2.13."""

_LORA_MODULES = dict(zip(get_args(LoraTarget), ("wq", "wkv", "wkv", "wo", "w1", "w3", "w2"), strict=True))
"""torchtitan's configs of what `trainer.lora.target_modules` names."""

_CHECKPOINTING = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}

# Weights come from the checkpoint; a tensor it lacks is an error, never a random one.
_NO_INIT = {"weight": skip_param_init}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The sharded model of this rank. All ranks must call its methods alike: they are collective."""

    module: nn.Module
    dims: ParallelDims
    shape: Architecture
    tensors: dict[str, Tensor]
    """The live float32 weights by Hugging Face name, detached; they share the parameters' storage, which stays.
    DTensors where they are sharded."""
    trained: dict[str, Tensor]
    """Those that learn: `tensors`, or LoRA's adapters likewise, by PEFT's names."""
    device: torch.device
    shares_prompts: bool
    """Whether its attention computes a prompt once that several samples begin with; the varlen kernel does not."""
    experts: tuple[Experts, ...]
    """Of each layer, where these replay what generators chose."""
    multiple: int
    """What the number of tokens of a row must be a multiple of: tensor-parallel ranks may share them."""

    def scores(self, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs and entropies [N] of the batch's targets (see `token_scores`), and the rows [N, D] before the head
        that predict them."""
        if self.experts:
            self._route(batch.routes)
        documents = PackedDocuments.of(batch.runs, batch.key_rows, self.device)
        scores: tuple[Tensor, Tensor, Tensor] = self.module(
            batch.tokens, batch.positions, documents, batch.rows, batch.targets, temperature, batch.supports
        )
        return scores

    def _route(self, routes: Tensor | None) -> None:
        """Have the experts compute the next rows, also when the backward pass computes them again."""
        if routes is not None:
            chosen, known = routes.sort(-1).values, (len(self.experts), self.experts[0].chosen)
            repeated = (chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] >= 0)
            if routes.shape[1:] != known or repeated.any() or chosen.max() >= len(self.experts[0].experts):
                raise TrainingError(f"the routes of a sample name no {known[1]} different experts in {known[0]} layers")
        for number, layer in enumerate(self.experts):
            layer.routes = None if routes is None else routes[:, number]

    def logprobs(self, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Those of `scores`, and its rows, without gradient: nothing is kept for a backward pass."""
        with torch.no_grad():
            logprobs, _, hidden = self.scores(batch, temperature=temperature)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # frees the weights that it gathered
        return logprobs, hidden


def build_policy(
    shape: Architecture, config: TrainerConfig, device: torch.device, *, beside: Policy | None = None
) -> Policy:
    """The sharded model with empty weights. torch.distributed must be up with `config.ranks` ranks.

    Args:
        beside: a model of the same parallelism in this process, whose process groups are used. Groups of its own would
            not do: DTensor takes equal meshes for the same one, so two models' collectives could mix their groups.
    """
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=config.replicas,
        data_parallel_shard_degree=config.data_parallel // config.replicas,
        tensor_parallel_degree=config.tensor_parallel,
        enable_sequence_parallel=config.sequence_parallel,
        spmd_backend=SPMD_BACKEND,
    )
    set_spmd_backend(SPMD_BACKEND)
    dims = ParallelDims.from_config(parallelism, config.ranks) if beside is None else beside.dims
    if beside is None:
        dims.build_mesh()
        if dims.tp_enabled:
            # One collective over both axes: two in sequence may round differently on different ranks, which would give
            # the ranks different gradient norms and let replicated weights drift apart.
            dims.get_mesh(["fsdp", "tp"])._flatten()
    varlen = device.type == "cuda" and config.dtype == "bfloat16"  # the kernel knows no other case
    if config.compile and not varlen:
        raise ConfigError(
            "trainer.compile needs CUDA and trainer.dtype bfloat16: elsewhere attention is computed document by "
            "document, and every packing of samples would be compiled anew"
        )
    model_config = decoder_config(shape, VarlenAttention.Config() if varlen else DocumentAttention.Config())
    set_qwen3_sharding_config(model_config, enable_sp=config.sequence_parallel, enable_ep=False)
    head = model_config.lm_head.sharding_config
    model_config.lm_head.sharding_config = dataclasses.replace(head, out_src_shardings=None, out_dst_shardings=None)
    names = shape.adapter(model_config)
    if config.lora.r:
        modules = sorted({_LORA_MODULES[each] for each in config.lora.target_modules})
        converter = LoRAConverter.Config(rank=config.lora.r, alpha=config.lora.lora_alpha, target_modules=modules)
        model_config = LoRAConverter(converter).convert(model_config)
    with torch.device("meta"):
        model = model_config.build()
    parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(dtype="float32", mixed_precision_param=config.dtype, mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=config.compile, components=["model"]),
        ac_config=_CHECKPOINTING[config.activation_checkpointing],
        dump_folder="",
        skip_dp=config.ranks == 1 and config.dtype == "float32",
    )
    if device.type == "cpu":
        reduce_gradients_by_plain_sums(model)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        share_padding_of_tied_shards(model)
    if config.parity == "bitwise":
        from titan_rl.policy.models.bitwise import make_bitwise

        make_bitwise(model, config)
    model.train()
    tensors = names.to_hf(model.state_dict())
    return Policy(
        module=model,
        dims=dims,
        shape=shape,
        tensors=tensors,
        trained=_adapters(model.state_dict(), names) if config.lora.r else tensors,
        device=device,
        shares_prompts=not varlen,
        experts=tuple(each for each in model.modules() if isinstance(each, Experts) and config.replay_routes),
        multiple=config.tensor_parallel if config.sequence_parallel else 1,
    )


def _adapters(state: Mapping[str, Tensor], names: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for which, kind in enumerate((".lora_a.", ".lora_b.")):
        of_weights = {name.replace(kind, "."): tensor for name, tensor in state.items() if kind in name}
        found |= {adapter_names(name)[which]: tensor for name, tensor in names.to_hf(of_weights).items()}
    return found


def frozen_policy(policy: Policy, config: TrainerConfig, teacher: Path | None = None) -> Policy:
    """The policy with its weights as they are now, bit for bit, or with empty ones a teacher's, sharded like it. It
    never learns: no gradient, no optimizer."""
    shape = policy.shape if teacher is None else read_shape(teacher, type(policy.shape))
    lora = config.lora if teacher is None else LoraConfig()  # a teacher is all in its checkpoint
    # Nothing is kept for a backward pass, so there is nothing to recompute in one. Its router chooses for itself.
    config = dataclasses.replace(config, activation_checkpointing="none", lora=lora, replay_routes=False)
    frozen = build_policy(shape, config, policy.device, beside=policy)
    frozen.module.eval().requires_grad_(False)
    if teacher is None:
        with torch.no_grad():
            for name, tensor in (policy.tensors | policy.trained).items():
                (frozen.tensors | frozen.trained)[name].copy_(tensor)
    return frozen


def decoder_config(shape: Architecture, attention: VarlenAttention.Config) -> Decoder.Config:
    """torchtitan's config of a model of any family and size."""
    return ScoringModel.Config(
        vocab_size=shape.vocab,
        dim=shape.dim,
        norm=shape.norm(shape.dim),
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab, embedding_dim=shape.dim, param_init=_NO_INIT),
        lm_head=ScoringHead.Config(in_features=shape.dim, out_features=shape.vocab, param_init=_NO_INIT),
        layers=[shape.layer(dataclasses.replace(attention)) for _ in range(shape.layers)],
    )


class Llama3RoPE(CosSinRoPE):
    """Llama 3.1's frequencies, which torchtitan has for rotations of neighbours only."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> Tensor:
        rotations = ComplexRoPE._precompute_cache(self)  # type: ignore[arg-type]  # it reads the config only
        return torch.cat([rotations.real] * 2 + [rotations.imag] * 2, dim=-1)


class ScoringHead(Linear):
    """torchtitan's head, which answers with scores and not with logits. It is called once per forward pass of the
    model, as FSDP expects of a module that shares its unit with others."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    as_engine = False
    """See `token_scores`."""

    def forward(
        self, input: Tensor, rows: Tensor, targets: Tensor, temperature: float, supports: Supports | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`input`: [1, T, D], under tensor parallelism the same on all ranks. `rows`, `targets`, `supports`: [N], which
        tokens predict something, what, and among what."""
        head, vocab_start, group = self.weight, 0, None
        if isinstance(head, DTensor) and isinstance(input, DTensor):
            mesh = head.device_mesh
            group = mesh.get_group()
            vocab_start = mesh.get_local_rank() * math.ceil(len(head) / mesh.size())  # split as by torch.chunk
            # Each rank's part of the vocabulary gives the hidden rows a summand of their gradient.
            head, input = head.to_local(), input.to_local(grad_placements=[Partial()])
        hidden = input[0].index_select(0, rows)
        parts: dict[str, Any] = {"vocab_start": vocab_start, "group": group, "as_engine": self.as_engine}
        return *token_scores(hidden, head, targets, temperature=temperature, supports=supports, **parts), hidden


class ScoringModel(Decoder):
    """A model whose output is `Policy.scores`."""

    _skip_lm_head = True

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        dim: int
        vocab_size: int

    def forward(
        self, tokens: Tensor, positions: Tensor, attention_masks: PackedDocuments, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores: tuple[Tensor, Tensor, Tensor] = self.lm_head(super().forward(tokens, positions, attention_masks), *rest)
        return scores


class PackedDocuments(VarlenMetadata):
    """torchtitan's description of a packed row, and the same for `DocumentAttention`.

    `runs` and `key_rows` are attributes and not fields of the tuple: FSDP walks through every field's items at every
    layer.
    """

    runs: tuple[tuple[Run, Tensor | None], ...]
    """Each with the keys that its segments' tokens see: [L, K] bool; None: up to their own."""
    key_rows: Tensor | None
    """[keys] int64, the tokens that each segment sees; None: its own."""

    @classmethod
    def of(cls, runs: Sequence[Run], key_rows: Tensor | None, device: torch.device) -> PackedDocuments:
        """`runs`, `key_rows`: of the micro-batch."""
        lengths = [run.length for run in runs for _ in range(run.segments)]
        boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self = cls(cu_seq_q=boundaries, cu_seq_k=boundaries, max_q=max(lengths), max_k=max(lengths))

        def mask(run: Run) -> Tensor:
            keys = run.shared + run.length
            return torch.ones(run.length, keys, dtype=torch.bool, device=device).tril(run.shared)

        self.runs = tuple((run, mask(run) if run.shared else None) for run in runs)
        self.key_rows = key_rows
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
        if attention_masks.key_rows is not None:
            keys, values = (tensor.index_select(0, attention_masks.key_rows) for tensor in (keys, values))
        runs = attention_masks.runs
        own = [run.segments * run.length for run, _ in runs]
        seen = [run.segments * (run.shared + run.length) for run, _ in runs]
        outputs = []
        # `split`, because the gradients of slices would be whole tensors of zeros, added up.
        for (run, mask), *parts in zip(runs, queries.split(own), keys.split(seen), values.split(seen), strict=True):
            q, k, v = (part.unflatten(0, (run.segments, -1)).transpose(1, 2) for part in parts)  # [., N, L, H]: views
            output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.view_as(q_BLNH)
