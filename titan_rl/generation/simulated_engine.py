"""An `Engine` that samples nothing: it waits as long as it is told a step takes and makes up its tokens.

For tests of scheduling, benchmarks of what stands above an engine, and planning. Its tokens are a pure function of
the request's seed and the position, so what a request gets does not depend on arrival, batch or rank. It imports
neither torch nor vLLM.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_rl.errors import ConfigError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import StepOutput, validate_request
from titan_rl.types import NO_VERSION, Completion, FinishReason, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import TensorShard

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MIXER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def simulated_token(seed: int, position: int, vocab_size: int) -> int:
    """The token that a simulated request gets at `position` of its completion (splitmix64 of seed and position)."""
    state = (seed + (position + 1) * _MIXER) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) % vocab_size


def simulated_engine(config: GeneratorConfig, model_path: str | Path, device: str) -> SimulatedEngine:
    """What `generator.engine = "simulated"` stands for: the model's vocabulary, the config's limits, steps that take
    no time.

    Raises:
        ConfigError: several ranks; they would have to split weights that nobody computes with.
    """
    if config.tensor_parallel != 1:
        raise ConfigError(f"a simulated engine has one rank, generator.tensor_parallel is {config.tensor_parallel}")
    return SimulatedEngine(
        max_model_len=config.max_model_len,
        vocab_size=json.loads((Path(model_path) / "config.json").read_text())["vocab_size"],
        max_num_seqs=config.max_num_seqs,
    )


class _Simulated:
    """One running request."""

    __slots__ = ("request", "length", "added_at", "tokens", "versions", "handed_out")

    def __init__(self, request: GenerationRequest, length: int, now: float) -> None:
        self.request = request
        self.length = length
        self.added_at = now
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.handed_out = 0


class SimulatedEngine:
    """See `engine.Engine`.

    Args:
        max_model_len: longest prompt and completion together, in tokens.
        vocab_size: of the tokens that are made up; the logprob of each is that of a uniform choice.
        max_num_seqs: requests that advance in one step; the others wait in order.
        seconds_per_step: what a step takes, whatever the batch.
        seconds_per_sequence: what each request in the batch adds to it.
        seconds_per_load: what loading weights takes.
        completion_length: tokens that a request gets, at most its `max_new_tokens`; default: all of them. A
            shorter one ends with `FinishReason.STOP`, and so does a stop token.
        sleep: waits; hand in a fake one to simulate faster than time.
        clock: seconds, for metrics.
    """

    def __init__(
        self,
        *,
        max_model_len: int = 4096,
        vocab_size: int = 32_000,
        max_num_seqs: int = 256,
        seconds_per_step: float = 0.0,
        seconds_per_sequence: float = 0.0,
        seconds_per_load: float = 0.0,
        completion_length: Callable[[GenerationRequest], int] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._seconds_per_step = seconds_per_step
        self._seconds_per_sequence = seconds_per_sequence
        self._seconds_per_load = seconds_per_load
        self._completion_length = completion_length or (lambda request: request.sampling.max_new_tokens)
        self._sleep = sleep
        self._clock = clock
        self._logprob = np.float32(-np.log(vocab_size))
        self._version = NO_VERSION
        self._weights: dict[str, Tensor] = {}
        self._running: dict[str, _Simulated] = {}
        self._streaming: dict[str, _Simulated] = {}  # of those
        self.steps = 0
        """Taken so far."""

    def validate(self, request: GenerationRequest) -> None:
        validate_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)

    def add(self, request: GenerationRequest) -> None:
        length = min(self._completion_length(request), request.sampling.max_new_tokens)
        running = self._running[request.request_id] = _Simulated(request, length, self._clock())
        if request.streams:
            self._streaming[request.request_id] = running

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        aborted = [self._end(request_id) for request_id in request_ids if request_id in self._running]
        return [self._complete(running, FinishReason.ABORT) for running in aborted]

    def step(self) -> StepOutput:
        batch = list(self._running.values())[: self._max_num_seqs]
        seconds = self._seconds_per_step + self._seconds_per_sequence * len(batch)
        if seconds > 0:
            self._sleep(seconds)
        sampled: list[int] = []
        finished: list[Completion] = []
        for running in batch:
            token = simulated_token(running.request.seed, len(running.tokens), self._vocab_size)
            running.tokens.append(token)
            running.versions.append(self._version)
            sampled.append(token)
            stopped = token in running.request.sampling.stop_token_ids
            if stopped or len(running.tokens) >= running.length:
                cut = not stopped and running.length == running.request.sampling.max_new_tokens
                self._end(running.request.request_id)
                finished.append(self._complete(running, FinishReason.LENGTH if cut else FinishReason.STOP))
        self.steps += 1
        return StepOutput(finished, np.array(sampled, dtype=np.int32))

    def take_pieces(self) -> list[Piece]:
        pieces = []
        for running in self._streaming.values():
            start, end = running.handed_out, len(running.tokens)
            if start < end:
                pieces.append(
                    Piece(
                        request_id=running.request.request_id,
                        offset=running.request.stream_from + start,
                        token_ids=np.array(running.tokens[start:], dtype=np.int32),
                        logprobs=np.full(end - start, self._logprob, dtype=np.float32),
                        versions=np.array(running.versions[start:], dtype=np.int64),
                    )
                )
                running.handed_out = end
        return pieces

    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    def has_work(self) -> bool:
        return bool(self._running)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> None:
        """Keeps copies, so that `served_shards` shows what was loaded and not the publication."""
        self._weights = {name: tensor.clone() for name, tensor in tensors}
        if self._seconds_per_load > 0:
            self._sleep(self._seconds_per_load)
        self._version = version.encode()

    def served_shards(self) -> Iterator[TensorShard]:
        weights = dict(self._weights)
        if EMBEDDING in weights:
            weights.setdefault(LM_HEAD, weights[EMBEDDING])  # tied
        for name, tensor in weights.items():
            yield TensorShard(name=name, data=tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim())

    def drop_cache(self) -> None:
        """There is no KV."""

    def sleep(self) -> int:
        return 0

    def wake(self) -> None:
        """Nothing was given up."""

    def close(self) -> None:
        self._running.clear()
        self._streaming.clear()

    def _end(self, request_id: str) -> _Simulated:
        self._streaming.pop(request_id, None)
        return self._running.pop(request_id)

    def _complete(self, running: _Simulated, reason: FinishReason) -> Completion:
        count = len(running.tokens)
        return Completion(
            request_id=running.request.request_id,
            token_ids=np.array(running.tokens, dtype=np.int32),
            logprobs=np.full(count, self._logprob, dtype=np.float32),
            versions=np.array(running.versions, dtype=np.int64),
            finish_reason=reason,
            metrics={"seconds_in_engine": self._clock() - running.added_at},
        )
