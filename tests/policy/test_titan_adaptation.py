"""What torchtitan lacks on CPU, pinned, and our attention in its place. About 15 s, most of it imports.

Each `still` test fails when torchtitan no longer needs the adaptation it names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from unittest import mock

import msgspec
import pytest
import torch
import torch.nn.functional as F

from titan_rl.errors import ConfigError
from titan_rl.policy.microbatch import Run
from titan_rl.policy.models.llama3 import Llama3, Llama3Rope
from titan_rl.policy.models.qwen3 import Qwen3
from titan_rl.policy.models.titan_adaptation import choose_device

choose_device("cpu")  # before the imports below, as in a trainer process

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torchtitan.distributed.context_parallel import apply_cp_to_forward  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common import CosSinRoPE  # noqa: E402
from torchtitan.models.common.attention import VarlenAttention  # noqa: E402

from titan_rl.policy.models.model import SPMD_BACKEND, DocumentAttention, PackedDocuments, decoder_config  # noqa: E402

HEADS, KV_HEADS, SIZE = 4, 2, 32


def packed(lengths: list[int], dtype=torch.float32):
    torch.manual_seed(0)
    total = sum(lengths)
    tensors = [torch.randn(1, total, heads, SIZE, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    runs = [Run(len(list(run)), length, 0) for length, run in groupby(lengths)]
    return tensors, PackedDocuments.of(runs, None, torch.device("cpu"))


def attend(tensors, documents):
    attention = DocumentAttention.Config().build()
    return attention(*tensors, attention_masks=documents, scale=SIZE**-0.5, enable_gqa=True)


CASES = {
    "none installed": (9, "cuda", "-"),
    "FlashAttention 3": (9, "cuda", "flash_attn_interface"),
    "on the CPU": (10, "cpu", "-"),
    "torchtitan's own": (9, "torchtitan's own", "-"),
}
"""Compute capability of the GPU (9 Hopper, 10 Blackwell), what the trainer computes on, which kernels are installed."""
BESIDE_A_GPU = """
import json, os, sys, traceback
from titan_rl.policy.models import titan_adaptation
from torchtitan.tools import utils
import torch.distributed.tensor, torch.nn.attention.flex_attention

print(utils.device_type, flush=True)
cases = json.loads(sys.argv[1])


def attention(capability, device, installed):
    utils.has_cuda_capability = lambda major, minor: capability >= major
    if device == "torchtitan's own":
        from torchtitan.models.common.attention import VarlenAttention as Attention
    else:
        titan_adaptation.find_spec = lambda package: package == installed or None
        titan_adaptation.choose_device(device)
        from titan_rl.policy.models.model import DocumentAttention as Attention
    print(utils.get_cuda_flash_attention_impl())
    if installed == "-":
        Attention.Config().build()


for name, case in cases.items():
    if os.fork() == 0:
        for descriptor in (1, 2):
            os.dup2(os.open(f"{sys.argv[2]}/{name} {descriptor}", os.O_WRONLY | os.O_CREAT), descriptor)
        try:
            attention(*case)
        except Exception:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def beside_a_gpu(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """By case, what a process prints and its errors; and the device that torchtitan has found."""
    directory = tmp_path_factory.mktemp("cases")
    program = [sys.executable, "-c", BESIDE_A_GPU, json.dumps(CASES), str(directory)]
    said = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()[-1]
    files = {case: tuple((directory / f"{case} {number}").read_text() for number in (1, 2)) for case in CASES}
    return files | {"device": (said, "")}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="asks about a machine without accelerator")
def test_torchtitan_still_takes_cuda_where_there_is_none(beside_a_gpu):
    assert beside_a_gpu["device"][0] == "cuda"


@pytest.mark.parametrize(
    ("case", "kernels"), [("none installed", "None"), ("FlashAttention 3", "FA3"), ("on the CPU", "None")]
)
def test_attention_takes_the_kernels_that_are_installed(beside_a_gpu, case, kernels):
    said, errors = beside_a_gpu[case]
    assert said.strip() == kernels and "Traceback" not in errors, errors
    assert ("FlashAttention 2" in errors) == (case == "none installed")


def test_torchtitan_still_demands_flash_attention_3_on_hopper(beside_a_gpu):
    assert "No module named 'flash_attn_interface'" in beside_a_gpu["torchtitan's own"][1]


def test_a_process_cannot_change_its_device():
    with pytest.raises(ConfigError, match="imported for 'cpu'"):
        choose_device("cuda")
    choose_device("cpu")


def test_varlen_attention_still_has_no_cpu_kernel():
    tensors, documents = packed([3, 5])
    with pytest.raises((NotImplementedError, RuntimeError)):
        VarlenAttention.Config().build()(*tensors, attention_masks=documents, enable_gqa=True)


def test_varlen_attention_still_has_no_context_parallelism():
    """When this fails, the trainer can offer it."""
    with pytest.raises(NotImplementedError, match="not yet supported"):
        apply_cp_to_forward([VarlenAttention.Config().build()], mock.Mock())


def test_layers_with_varlen_attention_compile_whole_and_for_any_lengths():
    """On no device, as `trainer.compile` does it: one graph for the first lengths, one for all others."""
    set_spmd_backend(SPMD_BACKEND)
    shape = Qwen3(
        **{"vocab": 9, "dim": 64, "layers": 1, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE, "ffn": 64},
        **{"max_length": 64, "rope_theta": 1e6, "norm_eps": 1e-6, "tied": True},
    )
    meta = torch.device("meta")
    with meta:
        model = decoder_config(shape, VarlenAttention.Config()).build().bfloat16()
    layer, counted = model.layers["0"], CompileCounterWithBackend("aot_eager")
    layer.compile(backend=counted, fullgraph=True)
    for lengths in ([5, 7], [9, 3, 4], [20], [6, 6, 6, 8, 9], [31, 2]):
        documents = PackedDocuments.of([Run(1, length, 0) for length in lengths], None, meta)
        hidden = torch.randn(1, sum(lengths), shape.dim, device=meta, dtype=torch.bfloat16, requires_grad=True)
        output = layer(hidden, documents, torch.zeros(1, sum(lengths), dtype=torch.int64, device=meta))
        output.sum().backward()
        assert hidden.grad.shape == output.shape == hidden.shape
    assert counted.frame_count == 2


SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3.2's."""


def test_llamas_rotations_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"vocab": 9, "dim": 64, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "ffn": 64}
    shape = Llama3(**sizes, max_length=9000, rope_theta=5e5, norm_eps=1e-5, rope_parameters=Llama3Rope(**SCALING))
    ours = shape.layer(DocumentAttention.Config()).attention.rope.build()
    parameters = SCALING | {"rope_type": "llama3", "rope_theta": shape.rope_theta}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=9000, rope_parameters=parameters
    )
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 64), torch.arange(9000)[None])
    assert torch.allclose(ours.cache, torch.cat(theirs, -1)[0], rtol=0, atol=1e-6)
    unscaled = msgspec.structs.replace(shape, rope_parameters=None).layer(DocumentAttention.Config()).attention.rope
    assert (ours.cache - unscaled.build().cache).abs().max() > 1


def test_torchtitan_still_cannot_scale_rotations_of_halves():
    """When this fails, `Llama3RoPE` can go."""
    with pytest.raises(NotImplementedError, match="Llama scaling"):
        CosSinRoPE.Config(dim=64, max_seq_len=9, scaling="llama").build()


def test_our_attention_passes_for_varlen():
    assert isinstance(DocumentAttention.Config(), VarlenAttention.Config)
    assert isinstance(DocumentAttention.Config().build(), VarlenAttention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[7], [4, 4, 4], [9, 4, 4, 1], [4, 9, 4]], ids=str)
def test_a_document_gets_the_same_bits_packed_and_alone(lengths, dtype):
    (q, k, v), documents = packed(lengths, dtype)
    together = attend((q, k, v), documents)
    assert together.dtype == dtype and together.shape == q.shape
    start = 0
    for length in lengths:
        part = [tensor[:, start : start + length] for tensor in (q, k, v)]
        _, single = packed([length])
        assert torch.equal(together[:, start : start + length], attend(part, single))
        start += length


def test_each_document_attends_causally_to_itself():
    lengths = [5, 5, 3]
    (q, k, v), documents = packed(lengths)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    allowed = (document[:, None] == document[None]) & torch.ones(13, 13, dtype=torch.bool).tril()
    wanted = F.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), attn_mask=allowed, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(attend((q, k, v), documents), wanted, atol=1e-6, rtol=1e-5)


def test_gradients_stay_within_their_document():
    (q, k, v), documents = packed([4, 4, 6])
    tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
    attend(tensors, documents)[:, 4:8].sum().backward()
    for tensor in tensors:
        assert not tensor.grad[:, :4].any() and not tensor.grad[:, 8:].any()
        assert torch.isfinite(tensor.grad).all()


def test_neighbours_of_one_length_are_one_call():
    _, documents = packed([9, 4, 4, 4, 1])
    assert documents.runs == (((1, 9, 0), None), ((3, 4, 0), None), ((1, 1, 0), None))
    assert documents.max_q == 9
    assert documents.cu_seq_q.tolist() == [0, 9, 13, 17, 21, 22]
