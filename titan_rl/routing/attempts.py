"""One request over several attempts: what the next attempt asks for, and what the caller gets of all of them.

The prompt of an attempt is the caller's and what earlier attempts have sampled; its budget is what is left. Tokens,
logprobs and versions of all attempts are stitched into one completion under the caller's id.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from titan_rl.seeding import derive_seed
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece

ATTEMPT_MARK = "~"
"""Between the caller's id and the number of a later attempt; callers' ids are free of it, so no two can be equal."""

MOST_PIECES = 256
"""Kept of one attempt; more become one, which takes a twentieth of the memory where each is a token."""


@dataclass(slots=True)
class OpenRequest:
    """One caller's request on its way."""

    asked: GenerationRequest  # as the caller sent it
    segments: list[Completion] = field(default_factory=list)  # what earlier attempts sampled
    pieces: list[Piece] = field(default_factory=list)  # what the caller was shown of the live attempt
    attempts: int = 0
    attempt: GenerationRequest | None = None  # live now; None while waiting
    generator: str = ""
    cost: int = 0
    waiting_since: float = 0.0
    started: float = 0.0  # of the live attempt
    seconds: float = 0.0  # that earlier attempts took
    deaths: list[str] = field(default_factory=list)  # of generators under it: why
    given_up: bool = False  # the caller aborted it, or its time is over: the next answer is the last

    @property
    def sampled(self) -> int:
        """Tokens of earlier attempts."""
        return sum(len(part.token_ids) for part in self.segments)


def from_pieces(attempt_id: str, request: OpenRequest) -> Completion:
    """As if the attempt had been interrupted after the last of its pieces."""
    shown = Piece.join(request.pieces)
    return Completion(
        request_id=attempt_id,
        token_ids=shown.token_ids,
        logprobs=shown.logprobs,
        versions=shown.versions,
        finish_reason=FinishReason.ABORT,
        generator=request.generator,
    )


def ending(request: OpenRequest, interrupted: Completion) -> FinishReason:
    """Why it ended: an interruption may come when the last token was just sampled, and nothing is left to do."""
    sampling = request.asked.sampling
    tokens = interrupted.token_ids
    if len(tokens) and int(tokens[-1]) in sampling.stop_token_ids and len(tokens) > sampling.min_new_tokens:
        return FinishReason.STOP
    if request.sampled + len(tokens) >= sampling.max_new_tokens:
        return FinishReason.LENGTH
    return FinishReason.ABORT


def next_attempt(request: OpenRequest) -> GenerationRequest:
    """The next attempt: the whole request, or what is left of it."""
    asked = request.asked
    if not request.attempts:
        return asked
    attempt = replace(asked, request_id=f"{asked.request_id}{ATTEMPT_MARK}{request.attempts}")
    if not request.segments:
        return attempt  # the same seed: the tokens that were lost are sampled again
    sampled = np.concatenate([segment.token_ids for segment in request.segments])
    return replace(
        attempt,
        prompt_token_ids=np.concatenate([asked.prompt_token_ids, sampled]),
        sampling=replace(asked.sampling, max_new_tokens=asked.sampling.max_new_tokens - len(sampled)),
        # An engine that starts again starts its random numbers again: the same seed would repeat the first draws.
        seed=derive_seed(asked.seed, "segment", len(request.segments)),
        stream_from=asked.stream_from + len(sampled) if asked.streams else asked.stream_from,
    )


def stitch(request: OpenRequest, last: Completion | None) -> Completion:
    """All segments as one completion under the caller's id; without a last one it ends as aborted."""
    parts = [*request.segments, *([last] if last is not None else [])]
    if len(parts) == 1 and parts[0].request_id == request.asked.request_id:
        return parts[0]
    metrics: dict[str, float] = {"segments": float(len(parts)), "attempts": float(request.attempts)}
    for part in parts:
        for name, value in part.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return Completion(
        request_id=request.asked.request_id,
        token_ids=np.concatenate([part.token_ids for part in parts] or [np.zeros(0, np.int32)]),
        logprobs=np.concatenate([part.logprobs for part in parts] or [np.zeros(0, np.float32)]),
        versions=np.concatenate([part.versions for part in parts] or [np.zeros(0, np.int64)]),
        finish_reason=last.finish_reason if last is not None else FinishReason.ABORT,
        generator=parts[-1].generator if parts else "",
        metrics=metrics,
    )
