"""Where torchtitan and FSDP must be adapted, most of it to a machine without accelerators. One function or class per
adaptation.

Each is applied explicitly, and each has a test that fails when torchtitan no longer needs it. `choose_device` must run
before any other part of torchtitan is imported, so this module imports torchtitan inside functions only; the
attention that replaces the missing CPU kernel is a torchtitan module and lives in `model.py`.
"""

import logging
import os
import sys
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from titan_rl.errors import ConfigError
from titan_rl.processes import join_world

_log = logging.getLogger(__name__)


def join_ranks(ranks: int, device: str) -> torch.device:
    """Bring torch.distributed up if it is not, and give this rank its device."""
    if device == "cuda":
        local = 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
    join_world("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    if dist.get_world_size() != ranks:
        raise ConfigError(
            f"trainer.data_parallel * trainer.tensor_parallel is {ranks}, but there are {dist.get_world_size()} ranks"
        )
    return torch.device(device, local) if device == "cuda" else torch.device(device)


def choose_device(device: str) -> None:
    """Make torchtitan compute on `device` ("cpu" or "cuda") in this process.

    torchtitan takes the first accelerator it finds, "cuda" when there is none, and its modules copy that choice when
    they are imported.

    Raises:
        ConfigError: torchtitan was already imported for another device.
    """
    from torchtitan.tools import utils

    copied = sys.modules.get("torchtitan.distributed.parallel_dims")
    if copied is not None and copied.device_type != device:
        raise ConfigError(
            f"torchtitan was imported for {copied.device_type!r} in this process and cannot change to {device!r}"
        )
    utils.device_type, utils.device_module = device, getattr(torch, device)
    kernels = _installed_flash_attention(device)
    utils.get_cuda_flash_attention_impl = lambda: kernels


def _installed_flash_attention(device: str) -> str | None:
    """torchtitan's choice for this GPU if it is installed, and None, FlashAttention 2, which torch brings, if not.
    torchtitan asks for it even where attention is not computed by it: on the CPU beside a GPU."""
    from torchtitan.tools import utils

    wanted = utils.get_cuda_flash_attention_impl() if device == "cuda" else None
    package = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}.get(wanted or "")
    if package is None or (find_spec(package.partition(".")[0]) and find_spec(package)):
        return wanted
    _log.warning("attention runs on FlashAttention 2: there is no %s, which is faster on this GPU", package)
    return None


def reduce_gradients_by_plain_sums(model: torch.nn.Module) -> None:
    """Reduce gradients with SUM: FSDP's pre-multiplied sum does not exist in gloo."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def share_padding_of_tied_shards(model: torch.nn.Module) -> None:
    """Make FSDP gather what the optimizer changes, where a weight is tied, tensor-parallel and unevenly sharded.

    Tensor parallelism splits embedding and head before they are tied again, so FSDP keeps them as two parameters. Each
    pads its uneven shard into memory of its own, and the tied weight lives in the last one's: the other would be
    gathered as it was at the start, for ever. Call it once the weights are tied and before the first forward pass.
    """
    shards = [
        shard
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for shard in group.fsdp_params
    ]
    for shard in shards:
        shard.reset_sharded_param()
    padded = {id(shard.sharded_param): shard._sharded_param_data for shard in shards}  # of each weight the last one's
    for shard in shards:
        shard._sharded_param_data = padded[id(shard.sharded_param)]
