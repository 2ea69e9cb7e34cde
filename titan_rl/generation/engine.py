"""`Engine`, which the loop drives, and what every engine shares.

One thread builds and calls an engine; any thread may call `validate`.

Contract of every implementation, the same on all ranks of a generator:

- The same calls in the same order give the same tokens: each request draws from its own seed.
- `step` costs nothing per request that did not finish beyond what the engine itself computes, and `new_pieces`
  nothing per request that does not stream.
- `served_shards` returns the memory that the next step computes with, never a copy.
- With `sampling.support`, a completion says of each token which ids could be drawn there. With `sampling.top_logprobs`
  it tells the likeliest ones, in the distribution that the token was drawn from. With `sampling.prompt_logprobs` the
  prompt is computed as a whole, whatever of it is in the prefix cache. With `sampling.routes` a mixture of experts on
  CPU says which of them computed each token, those found in the prefix cache too.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titan_rl.errors import RequestError, RequestTooLong
from titan_rl.support import Supports
from titan_rl.types import MOST_TOP, NO_VERSION, TOP, Completion, FinishReason, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import TensorShard

if TYPE_CHECKING:
    from torch import Tensor

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures (other than 0) to this, so the logprobs would not be those that were asked for."""
STRONGEST_PENALTY = 2.0
"""Bound on presence and frequency penalties, either way: vLLM's own."""
PIECE_SECONDS, MOST_PIECE_SECONDS = 0.002, 0.1
"""Time between two pieces of a request, for each request that streams, and at most. A piece costs 0.2 ms of CPU over
all processes up to the client, so streams take a tenth of a core. One alone gets every token as it is sampled."""


class StepOutput(NamedTuple):
    finished: list[Completion]
    sampled: np.ndarray  # [N] int32: every token of this step, in the engine's order; goes into the digest


class Engine(ABC):
    """A text-generation engine, as one tensor-parallel rank sees it."""

    tells_support = False
    """Whether it can say what a token was drawn from; it refuses requests that ask for more."""

    def __init__(self, *, max_model_len: int, vocab_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_model_len` and `vocab_size`: see `validate_request`. `clock`: seconds, for metrics."""
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._clock = clock
        self._running: dict[str, RunningRequest] = {}  # oldest first
        self._streaming: dict[str, RunningRequest] = {}  # of those
        self._recorded: dict[str, RunningRequest] = {}  # of those the ones that ask for more than their tokens
        self._next_pieces = 0.0  # when requests that had a piece get the next one
        self._version = NO_VERSION  # encoded

    def validate(self, request: GenerationRequest) -> None:
        """Raise what `validate_request` raises, or RequestError: the constraint cannot be kept. Any thread may call
        it."""
        if request.sampling.support and not self.tells_support:
            raise RequestError(
                f"request {request.request_id!r}: this engine does not say which tokens were possible, as training "
                "needs it of answers that are constrained, or truncated by top_p, top_k or min_p"
            )
        validate_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        if request.sampling.constraint:
            self._check_constraint(request)

    @abstractmethod
    def add(self, request: GenerationRequest) -> None:
        """Add a validated request, whose id must not be running."""

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """End running requests now, in the order of the ids, with the tokens so far; unknown ids are ignored. What has
        ended since the last step comes first."""
        aborted = [self._end(request_id) for request_id in request_ids if request_id in self._running]
        now = self._clock()
        return [running.complete(FinishReason.ABORT, now) for running in aborted]

    @abstractmethod
    def step(self) -> StepOutput:
        """Sample one token for each running request that fits into the batch."""

    def new_pieces(self) -> list[Piece]:
        """What was sampled since its last piece for each running request that streams, oldest request first. The first
        piece of a request comes at once, the others at most every `PIECE_SECONDS`.

        A request that has ended gives no more pieces; its completion has all tokens. Changes nothing that the ranks
        must agree on, so rank 0 may call it alone.
        """
        due = bool(self._streaming) and (now := self._clock()) >= self._next_pieces
        if due:
            self._next_pieces = now + min(PIECE_SECONDS * len(self._streaming), MOST_PIECE_SECONDS)
        streaming = (each for each in self._streaming.values() if due or not each.streamed)
        return [each.new_piece() for each in streaming if each.streamed < len(each.tokens)]

    def running(self) -> tuple[str, ...]:
        """Oldest first."""
        return tuple(self._running)

    def has_work(self) -> bool:
        return bool(self._running)

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> None:
        """Overwrite weights in place; tokens of later steps carry `version`. KV is not touched: see `drop_cache`.
        `tensors`: whole ones under Hugging Face names; every tensor-parallel rank takes its part."""

    @abstractmethod
    def served_shards(self) -> Iterator[TensorShard]:
        """This rank's part of every weight, as views of what the engine computes with. Raises WeightsError: it computes
        with memory that cannot be inspected, or has a parameter of unknown layout.

        Hugging Face names; fused projections taken apart, vocabulary padding cut off, and `lm_head.weight` always
        reported by its own name from the module that computes logits, tied or not.
        """

    @abstractmethod
    def drop_cache(self) -> None:
        """Forget all KV. Running requests keep their tokens and recompute."""

    def sleep(self) -> int:
        """Free what memory can be freed; no request is running. Returns the bytes that were freed."""
        return 0

    def wake(self) -> None:  # noqa: B027  # an engine that frees nothing has nothing to do
        """Allocate that memory again."""

    def close(self) -> None:  # noqa: B027
        """Free everything. The last call."""

    def _check_constraint(self, request: GenerationRequest) -> None:
        raise RequestError(f"request {request.request_id!r}: this engine cannot constrain what it samples")

    def _begin(self, request: GenerationRequest) -> RunningRequest:
        running = self._running[request.request_id] = RunningRequest(request, self._clock(), [(self._version, 0)])
        if request.streams:
            self._streaming[request.request_id] = running
        sampling = request.sampling
        if sampling.support or sampling.top_logprobs or sampling.prompt_logprobs:
            self._recorded[request.request_id] = running
        return running

    def _end(self, request_id: str) -> RunningRequest:
        self._streaming.pop(request_id, None)
        self._recorded.pop(request_id, None)
        return self._running.pop(request_id)

    def _serve(self, version: PolicyVersion) -> None:
        self._version = version.encode()
        for running in self._running.values():
            running.spans.append((self._version, len(running.tokens)))


def validate_request(request: GenerationRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Refuse a request that no engine of this shape can serve. Raises RequestError, naming the request, the value and
    the limit. `max_model_len`: longest prompt and completion together, in tokens. Token ids are in [0, `vocab_size`).
    """

    def refuse(problem: str) -> None:
        raise RequestError(f"request {request.request_id!r}: {problem}")

    prompt, sampling = request.prompt_token_ids, request.sampling
    if not isinstance(request.request_id, str) or not request.request_id:
        refuse("the request id must be a non-empty string")
    if len(prompt) == 0:
        refuse("the prompt is empty")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        outside = int(prompt[(prompt < 0) | (prompt >= vocab_size)][0])
        refuse(f"prompt token {outside} is outside of the vocabulary [0, {vocab_size})")
    for name in ("max_new_tokens", "top_k", "min_new_tokens"):
        if not isinstance(getattr(sampling, name), (int, np.integer)):
            refuse(f"{name} must be an integer, got {getattr(sampling, name)!r}")
    if not 0 <= sampling.top_logprobs <= MOST_TOP:
        refuse(f"the logprobs of {sampling.top_logprobs} tokens were asked for, at most {MOST_TOP} are told")
    if not all(isinstance(number, (int, np.integer)) for number in (request.seed, *sampling.stop_token_ids)):
        refuse(f"the seed and stop_token_ids must be integers, got {request.seed!r} and {sampling.stop_token_ids!r}")
    if sampling.max_new_tokens < 1:
        refuse(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
    if len(prompt) + sampling.max_new_tokens > max_model_len:
        new = f"and {sampling.max_new_tokens} of max_new_tokens " if len(prompt) < max_model_len else ""
        problem = f"{len(prompt)} prompt tokens {new}do not fit into max_model_len ({max_model_len})"
        raise RequestTooLong(f"request {request.request_id!r}: {problem}")
    if sampling.temperature != 0 and not LOWEST_TEMPERATURE <= sampling.temperature < math.inf:
        refuse(f"temperature must be 0 (greedy) or at least {LOWEST_TEMPERATURE}, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        refuse(f"top_p must be in (0, 1], got {sampling.top_p}")
    if not 0 <= sampling.min_p <= 1:
        refuse(f"min_p must be in [0, 1], got {sampling.min_p}")
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


@dataclass(slots=True)
class RunningRequest:
    """A request in an engine and its tokens so far. A token costs two list appends; arrays are made at the end."""

    request: GenerationRequest
    added_at: float
    spans: list[tuple[int, int]]
    """Encoded version, index of its first token."""
    first_at: float = 0.0
    cached: int = 0
    """Prompt tokens whose KV was in the prefix cache."""
    kv_drops: int = 0
    """How often new weights took its KV."""
    recomputed: int = 0
    """Tokens whose KV that was."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    streamed: int = 0
    """Tokens that pieces had."""
    supports: dict[int, np.ndarray] = field(default_factory=dict)
    """By index of the token, where it was not drawn from the whole vocabulary; kept only where that is asked for."""
    tops: list[np.ndarray] = field(default_factory=list)
    """As `Completion.top_logprobs`, of each token; kept only where that is asked for."""
    prompt_logprobs: np.ndarray | None = None
    routes: list[np.ndarray] = field(default_factory=list)
    """As `Completion.routes`, of each token; kept only where that is asked for."""
    prompt_routes: np.ndarray | None = None

    def add(self, token: int, logprob: float, now: float) -> None:
        if not self.tokens:
            self.first_at = now
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def add_top(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Tell the likeliest tokens at the next place, at least as many as are asked for or there are: [n] each."""
        count = self.request.sampling.top_logprobs
        self.tops.append(_top(ids[:count], logprobs[:count]))

    def add_prompt(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """As `Completion.prompt_logprobs`: [T_prompt - 1, 1 + n] each."""
        self.prompt_logprobs = _top(ids, logprobs)

    def new_piece(self) -> Piece:
        """The tokens since the piece before."""
        start, self.streamed = self.streamed, len(self.tokens)
        offset = self.request.stream_from + start
        return Piece(request_id=self.request.request_id, offset=offset, **self._sampled(start))

    def complete(self, reason: FinishReason, now: float) -> Completion:
        metrics = {
            "generation/seconds_in_engine": now - self.added_at,
            "generation/prompt_tokens": float(len(self.request.prompt_token_ids)),
            "generation/cached_tokens": float(self.cached),
        }
        if self.tokens:
            metrics["generation/seconds_to_first_token"] = self.first_at - self.added_at
        if self.recomputed:
            metrics["generation/recomputed_tokens"] = float(self.recomputed)
        return Completion(request_id=self.request.request_id, finish_reason=reason, metrics=metrics, **self._sampled(0))

    def _sampled(self, start: int) -> dict[str, Any]:
        """The arrays of the tokens from `start` on."""
        versions = np.empty(len(self.tokens) - start, dtype=np.int64)
        for version, first in self.spans:
            versions[max(first - start, 0) :] = version
        tops, routes = self.tops[start : len(self.tokens)], self.routes[start : len(self.tokens)]
        return {
            "token_ids": np.array(self.tokens[start:], dtype=np.int32),
            "logprobs": np.array(self.logprobs[start:], dtype=np.float32),
            "versions": versions,
            "supports": Supports.of(self.supports, start, len(self.tokens)),
            "top_logprobs": np.stack(tops) if tops else None,
            "prompt_logprobs": None if start else self.prompt_logprobs,
            "routes": np.stack(routes) if routes else None,
            "prompt_routes": None if start else self.prompt_routes,
        }


def _top(ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    told = np.empty(ids.shape, TOP)
    told["token"], told["logprob"] = ids, logprobs
    return told


RunningRequests = Mapping[str, RunningRequest]
"""By id."""
