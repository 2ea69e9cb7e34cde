"""An engine that needs neither torch nor vLLM. Its tokens are a function of the request's seed and the position, not
of arrival, batch or rank.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import Engine, StepOutput
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion
from titan_rl.weights.manifest import EMBEDDING, LM_HEAD, TensorShard

if TYPE_CHECKING:
    from torch import Tensor


def simulated_token(seed: int, position: int, vocab_size: int) -> int:
    """The token that a simulated request gets at `position`, prompt included."""
    return zlib.crc32(f"{seed} {position}".encode()) % vocab_size


def simulated_engine(config: GeneratorConfig, model_path: str | Path, device: str) -> SimulatedEngine:
    """`generator.engine = "simulated"`: steps take no time."""
    return SimulatedEngine(
        max_model_len=config.max_model_len,
        vocab_size=json.loads((Path(model_path) / "config.json").read_text())["vocab_size"],
        max_num_seqs=config.max_num_seqs,
    )


class SimulatedEngine(Engine):
    """For tests of scheduling, and benchmarks of what stands above an engine. The logprob of every token is that of a
    uniform choice. `max_num_seqs`: requests that advance in one step; the others wait in order."""

    tells_support = True  # all tokens are possible

    def __init__(
        self,
        *,
        max_model_len: int = 4096,
        vocab_size: int = 32_000,
        max_num_seqs: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_model_len=max_model_len, vocab_size=vocab_size, clock=clock)
        self._max_num_seqs = max_num_seqs
        self._logprob = float(np.float32(-np.log(vocab_size)))
        self._weights: dict[str, Tensor] = {}

    def length_of(self, request: GenerationRequest) -> int:
        """Tokens that it gets at most. If that is less than its `max_new_tokens`, it ends with `FinishReason.STOP`."""
        return request.sampling.max_new_tokens

    def add(self, request: GenerationRequest) -> None:
        running, sampling = self._begin(request), request.sampling
        if sampling.prompt_logprobs:
            count = 1 + min(sampling.top_logprobs, self._vocab_size)
            ids = (request.prompt_token_ids[1:, None] + np.arange(count)) % self._vocab_size
            running.add_prompt(ids, np.full(ids.shape, self._logprob))

    def step(self) -> StepOutput:
        now = self._clock()
        sampled: list[int] = []
        finished: list[Completion] = []
        for running in list(self._running.values())[: self._max_num_seqs]:
            request, sampling = running.request, running.request.sampling
            position = len(request.prompt_token_ids) + len(running.tokens)
            token = simulated_token(request.seed, position, self._vocab_size)
            if count := min(sampling.top_logprobs, self._vocab_size):
                running.add_top((token + np.arange(count)) % self._vocab_size, np.full(count, self._logprob))
            running.add(token, self._logprob, now)
            sampled.append(token)
            stopped, cut = token in sampling.stop_token_ids, len(running.tokens) == sampling.max_new_tokens
            if stopped or cut or len(running.tokens) >= self.length_of(request):
                reason = FinishReason.LENGTH if cut and not stopped else FinishReason.STOP
                finished.append(self._end(request.request_id).complete(reason, now))
        return StepOutput(finished, np.array(sampled, dtype=np.int32))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> None:
        """Keeps copies, so that `served_shards` shows what was loaded and not the publication."""
        self._weights = {name: tensor.clone() for name, tensor in tensors}
        self._serve(version)

    def served_shards(self) -> Iterator[TensorShard]:
        weights = dict(self._weights)
        if EMBEDDING in weights:
            weights.setdefault(LM_HEAD, weights[EMBEDDING])  # tied
        for name, tensor in weights.items():
            yield TensorShard.whole(name, tensor)

    def drop_cache(self) -> None:
        """There is no KV."""
