"""A frozen copy of the policy, sharded like it, that a KL term compares with.

Its weights come from a publication only, and only a verified one: `logprobs` is refused until the fingerprints of what
this model computes with were those of the manifest on all ranks. It never learns: no gradient, no optimizer.

Import this module only after `titan_adaptation.choose_device`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_rl.errors import TrainingError, WeightsError
from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.microbatch import MicroBatch
from titan_rl.policy.models.model import Policy, build_policy
from titan_rl.policy.models.qwen3 import LM_HEAD
from titan_rl.policy.models.sharding import local_box
from titan_rl.policy.token_scores import token_scores
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication
from titan_rl.weights.puller import WeightPuller
from titan_rl.weights.ranks import Ranks
from titan_rl.weights.shards import TensorShard


class ReferencePolicy:
    """One rank's part. All ranks call `load` and `logprobs` alike: they are collective.

    Make it where an actor's context is current, which `rdma:` publications need.

    Attributes:
        version: of the loaded weights; None before.
    """

    def __init__(self, policy: Policy, config: TrainerConfig, *, temperature: float) -> None:
        """An empty copy of `policy`, which was built with `config`."""
        # Nothing is kept for a backward pass, so there is nothing to recompute in one.
        config = dataclasses.replace(config, activation_checkpointing=False)
        self._policy = build_policy(policy.shape, config, policy.device, beside=policy)
        self._policy.module.eval().requires_grad_(False)
        self._temperature = temperature
        self._group = dist.group.WORLD if config.ranks > 1 else None
        self._puller = WeightPuller()
        self.version: PolicyVersion | None = None

    def load(self, publication: Publication) -> int:
        """Take this rank's shards of a publication and verify them; what was pulled from is let go.

        Returns:
            The combined fingerprint, as generators report it.

        Raises:
            WeightsError: on all ranks: the publication cannot be read, or is not what this model now computes with. The
                reference cannot be used until another load succeeds.
        """
        self.version = None
        what = f"loading {publication.channel} {publication.version} as the reference policy"
        try:
            Ranks(self._group).together(what, lambda: self._fill(publication))
            dtypes = {entry.dtype for entry in publication.manifest.entries}
            fingerprint = self._puller.verify(publication, self._served(dtypes.pop()), self._group)
        finally:
            self._puller.close()
        self.version = publication.version
        return fingerprint

    def logprobs(self, microbatch: MicroBatch) -> Tensor:
        """[N] float32: of the micro-batch's trained tokens, at the sampling temperature; no gradient."""
        if self.version is None:
            raise TrainingError("the KL term has no reference: pull_reference was not called, or failed")
        with torch.no_grad():
            logprobs, _ = token_scores(
                self._policy.logits(microbatch)[microbatch.rows],
                microbatch.targets,
                temperature=self._temperature,
                vocab_start=self._policy.vocab_start,
                group=self._policy.tensor_group,
            )
        self._policy.reshard()
        return logprobs

    def _fill(self, publication: Publication) -> None:
        tensors = self._policy.tensors()
        with torch.no_grad():
            for name, whole in self._puller.tensors(publication):
                if name not in tensors:
                    raise WeightsError(f"{name} is no tensor of this policy")
                box = local_box(name, tensors[name])
                if box.data.numel():
                    box.data.copy_(whole[box.slices])

    def _served(self, dtype: str) -> Iterator[TensorShard]:
        """What this model computes with, in the dtype of the publication; a tied head under its own name too."""
        tensors = dict(self._policy.tensors())
        if self._policy.aliases:  # looked at where the model itself finds it, which a broken tie would show
            head = self._policy.module.get_parameter(LM_HEAD)
            assert isinstance(head, DTensor)
            tensors[LM_HEAD] = head
        for name, tensor in tensors.items():
            box = local_box(name, tensor)
            if box.data.numel():
                yield TensorShard(
                    name=name,
                    # Exact: these are widened copies of values in that dtype, or the fingerprint will say so.
                    data=box.data.detach().to(getattr(torch, dtype)),
                    global_shape=tuple(tensor.shape),
                    offset=box.offset,
                    counted=box.counted,
                )
