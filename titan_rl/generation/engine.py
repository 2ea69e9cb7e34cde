"""`Engine`, the interface that the loop drives, and `SimulatedEngine`, which needs neither torch nor vLLM.

One thread builds and calls an engine; any thread may call `validate`.

Contract of every implementation, the same on all ranks of a generator:

- The same calls in the same order give the same tokens: each request draws from its own seed.
- `step` costs nothing per request that did not finish beyond what the engine itself computes, and `take_pieces`
  nothing per request that does not stream.
- `served_shards` returns the memory that the next step computes with, never a copy.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from titan_rl.errors import RequestError, RequestTooLong
from titan_rl.generation.config import GeneratorConfig
from titan_rl.types import NO_VERSION, Completion, FinishReason, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import TensorShard

if TYPE_CHECKING:
    from torch import Tensor

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures (other than 0) to this, so the logprobs would not be those that were asked for."""
STRONGEST_PENALTY = 2.0
"""Bound on presence and frequency penalties, either way: vLLM's own."""

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MIXER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class StepOutput(NamedTuple):
    """What one engine step gave."""

    finished: list[Completion]
    sampled: np.ndarray  # [N] int32: every token of this step, in the engine's order; goes into the digest


class Engine(Protocol):
    """A text-generation engine, as one tensor-parallel rank sees it."""

    def validate(self, request: GenerationRequest) -> None:
        """Refuse a request that `add` could not take. Thread-safe and without any effect on the engine.

        Raises:
            RequestError: over-long, empty, out of vocabulary or with bad sampling values.
        """

    def add(self, request: GenerationRequest) -> None:
        """Add a validated request, whose id must not be running."""

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """End running requests now; unknown ids are ignored.

        Returns:
            Completions with the tokens so far and `FinishReason.ABORT`, in the order of the ids.
        """

    def step(self) -> StepOutput:
        """Sample one token for each running request that fits into the batch."""

    def take_pieces(self) -> list[Piece]:
        """What was sampled since the last call for each running request that streams, oldest request first.

        A request that has ended gives no more pieces; its completion has all tokens. Changes nothing that the ranks
        must agree on, so rank 0 may call it alone.
        """

    def running(self) -> tuple[str, ...]:
        """Ids of the unfinished requests, oldest first."""

    def has_work(self) -> bool:
        """Whether any request is unfinished."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> None:
        """Overwrite weights in place; tokens of later steps carry `version`. KV is not touched: see `drop_cache`.

        Args:
            tensors: whole tensors under Hugging Face names; every tensor-parallel rank takes its part.
        """

    def served_shards(self) -> Iterator[TensorShard]:
        """This rank's part of every weight, as views of what the engine computes with.

        Hugging Face names; fused projections taken apart, vocabulary padding cut off, and `lm_head.weight` always
        reported by its own name from the module that computes logits, tied or not.

        Raises:
            WeightsError: the engine computes with memory that cannot be inspected, or has a parameter of unknown
                layout.
        """

    def drop_cache(self) -> None:
        """Forget all KV. Running requests keep their tokens and recompute."""

    def sleep(self) -> int:
        """Free memory; no request is running. Returns the bytes that were freed."""

    def wake(self) -> None:
        """Allocate the memory again."""

    def close(self) -> None:
        """Free everything. The last call."""


def validate_request(request: GenerationRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Refuse a request that no engine of this shape can serve.

    Args:
        request: what was asked.
        max_model_len: longest prompt and completion together, in tokens.
        vocab_size: token ids are in [0, vocab_size).

    Raises:
        RequestError: naming the request, the value and the limit.
    """

    def refuse(problem: str) -> None:
        raise RequestError(f"request {request.request_id!r}: {problem}")

    prompt, sampling = request.prompt_token_ids, request.sampling
    if not isinstance(request.request_id, str) or not request.request_id:
        refuse("the request id must be a non-empty string")
    if not isinstance(prompt, np.ndarray) or prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        refuse("prompt_token_ids must be a one-dimensional integer array")
    if len(prompt) == 0:
        refuse("the prompt is empty")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        outside = int(prompt[(prompt < 0) | (prompt >= vocab_size)][0])
        refuse(f"prompt token {outside} is outside of the vocabulary [0, {vocab_size})")
    for name in ("max_new_tokens", "top_k", "min_new_tokens"):
        if not isinstance(getattr(sampling, name), Integral):
            refuse(f"{name} must be an integer, got {getattr(sampling, name)!r}")
    if not all(isinstance(number, Integral) for number in (request.seed, *sampling.stop_token_ids)):
        refuse(f"the seed and stop_token_ids must be integers, got {request.seed!r} and {sampling.stop_token_ids!r}")
    if sampling.max_new_tokens < 1:
        refuse(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
    if len(prompt) + sampling.max_new_tokens > max_model_len:
        raise RequestTooLong(
            f"request {request.request_id!r}: {len(prompt)} prompt tokens and up to {sampling.max_new_tokens} new ones "
            f"are more than max_model_len ({max_model_len})"
        )
    temperature = sampling.temperature
    if not math.isfinite(temperature) or temperature < 0 or 0 < temperature < LOWEST_TEMPERATURE:
        refuse(f"temperature must be 0 (greedy) or at least {LOWEST_TEMPERATURE}, got {temperature}")
    if not 0 < sampling.top_p <= 1:
        refuse(f"top_p must be in (0, 1], got {sampling.top_p}")
    if sampling.top_k != -1 and not 1 <= sampling.top_k:
        refuse(f"top_k must be -1 (off) or at least 1, got {sampling.top_k}")
    if any(not 0 <= token < vocab_size for token in sampling.stop_token_ids):
        refuse(f"stop_token_ids {sampling.stop_token_ids} reach outside of the vocabulary [0, {vocab_size})")
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        refuse(
            f"min_new_tokens must be in [0, max_new_tokens ({sampling.max_new_tokens})], got {sampling.min_new_tokens}"
        )
    if sampling.min_new_tokens and len(set(sampling.stop_token_ids)) == vocab_size:
        refuse("with min_new_tokens at least one token must not be a stop token")
    if not math.isfinite(sampling.repetition_penalty) or sampling.repetition_penalty <= 0:
        refuse(f"repetition_penalty must be positive (1 is off), got {sampling.repetition_penalty}")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(sampling, name)
        if not abs(penalty) <= STRONGEST_PENALTY:
            refuse(f"{name} must be in [-{STRONGEST_PENALTY:g}, {STRONGEST_PENALTY:g}], got {penalty}")
    if not 0 <= request.seed < 2**63:
        refuse(f"the seed must be in [0, 2**63), got {request.seed}")


class RunningRequest:
    """A request in an engine and its tokens so far. A token costs two list appends; arrays are made at the end.

    Args:
        version: encoded, which samples its first token unless `serve` names another one before.
    """

    __slots__ = (
        "request_id",
        "prompt_length",
        "stream_from",
        "added_at",
        "first_at",
        "cached",
        "tokens",
        "logprobs",
        "spans",
        "handed_out",
    )

    def __init__(self, request: GenerationRequest, version: int, now: float) -> None:
        self.request_id = request.request_id
        self.prompt_length = len(request.prompt_token_ids)
        self.stream_from = request.stream_from
        self.added_at = now
        self.first_at = 0.0
        self.cached = 0
        """Prompt tokens whose KV was in the prefix cache."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans = [(version, 0)]  # (encoded version, index of its first token)
        self.handed_out = 0

    def serve(self, version: int) -> None:
        """This encoded version samples the tokens from now on."""
        self.spans.append((version, len(self.tokens)))

    def add(self, token: int, logprob: float, now: float) -> None:
        """Add the token of one step."""
        if not self.tokens:
            self.first_at = now
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def piece(self) -> Piece:
        """The tokens that were not handed out yet."""
        start, self.handed_out = self.handed_out, len(self.tokens)
        return Piece(
            request_id=self.request_id,
            offset=self.stream_from + start,
            token_ids=np.array(self.tokens[start:], dtype=np.int32),
            logprobs=np.array(self.logprobs[start:], dtype=np.float32),
            versions=self._versions(start),
        )

    def complete(self, reason: FinishReason, now: float) -> Completion:
        """The completion of all tokens so far."""
        metrics = {
            "seconds_in_engine": now - self.added_at,
            "prompt_tokens": float(self.prompt_length),
            "cached_tokens": float(self.cached),
        }
        if self.tokens:
            metrics["seconds_to_first_token"] = self.first_at - self.added_at
        return Completion(
            request_id=self.request_id,
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=self._versions(0),
            finish_reason=reason,
            metrics=metrics,
        )

    def _versions(self, start: int) -> np.ndarray:
        """Encoded versions of the tokens from `start` on; [T] int64."""
        versions = np.empty(len(self.tokens) - start, dtype=np.int64)
        for version, first in self.spans:
            versions[max(first - start, 0) :] = version
        return versions


def simulated_token(seed: int, position: int, vocab_size: int) -> int:
    """The token that a simulated request gets at `position`, prompt included (splitmix64 of both)."""
    state = (seed + (position + 1) * _MIXER) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) % vocab_size


def simulated_engine(config: GeneratorConfig, model_path: str | Path, device: str) -> SimulatedEngine:
    """What `generator.engine = "simulated"` stands for: the model's vocabulary, the config's limits, steps that take
    no time."""
    return SimulatedEngine(
        max_model_len=config.max_model_len,
        vocab_size=json.loads((Path(model_path) / "config.json").read_text())["vocab_size"],
        max_num_seqs=config.max_num_seqs,
    )


class SimulatedEngine:
    """An `Engine` that samples nothing: it waits as long as a step is said to take and makes up its tokens.

    For tests of scheduling, benchmarks of what stands above an engine, and planning. Its tokens are a function of the
    request's seed and the position, so they do not depend on arrival, batch or rank.

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
        self._logprob = float(np.float32(-np.log(vocab_size)))
        self._version = NO_VERSION
        self._weights: dict[str, Tensor] = {}
        self._running: dict[str, tuple[GenerationRequest, int, RunningRequest]] = {}  # with its length
        self._streaming: dict[str, RunningRequest] = {}  # of those
        self.steps = 0
        """Taken so far."""

    def validate(self, request: GenerationRequest) -> None:
        validate_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)

    def add(self, request: GenerationRequest) -> None:
        running = RunningRequest(request, self._version, self._clock())
        length = min(self._completion_length(request), request.sampling.max_new_tokens)
        self._running[request.request_id] = request, length, running
        if request.streams:
            self._streaming[request.request_id] = running

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        aborted = [self._end(request_id) for request_id in request_ids if request_id in self._running]
        return [running.complete(FinishReason.ABORT, self._clock()) for running in aborted]

    def step(self) -> StepOutput:
        batch = list(self._running.values())[: self._max_num_seqs]
        seconds = self._seconds_per_step + self._seconds_per_sequence * len(batch)
        if seconds > 0:
            self._sleep(seconds)
        now = self._clock()
        sampled: list[int] = []
        finished: list[Completion] = []
        for request, length, running in batch:
            position = len(request.prompt_token_ids) + len(running.tokens)
            token = simulated_token(request.seed, position, self._vocab_size)
            running.add(token, self._logprob, now)
            sampled.append(token)
            stopped = token in request.sampling.stop_token_ids
            if stopped or len(running.tokens) >= length:
                cut = not stopped and length == request.sampling.max_new_tokens
                reason = FinishReason.LENGTH if cut else FinishReason.STOP
                finished.append(self._end(request.request_id).complete(reason, now))
        self.steps += 1
        return StepOutput(finished, np.array(sampled, dtype=np.int32))

    def take_pieces(self) -> list[Piece]:
        return [each.piece() for each in self._streaming.values() if each.handed_out < len(each.tokens)]

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
        for _, _, running in self._running.values():
            running.serve(self._version)

    def served_shards(self) -> Iterator[TensorShard]:
        weights = dict(self._weights)
        if _EMBEDDING in weights:
            weights.setdefault(_LM_HEAD, weights[_EMBEDDING])  # tied
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

    def _end(self, request_id: str) -> RunningRequest:
        self._streaming.pop(request_id, None)
        return self._running.pop(request_id)[2]
