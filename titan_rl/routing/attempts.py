"""One request over several attempts: makes the next attempt, and stitches all attempts into one completion.

The prompt of an attempt is the caller's prompt plus the tokens of earlier attempts; its budget is the rest; its seed is
the caller's. Noise depends on the seed and the position, so tokens that were lost are sampled again, and the rest is
what it would have been. Tokens, logprobs and versions of all attempts are stitched into one completion under the
caller's id.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece

ATTEMPT_MARK = "~"
"""Separates the caller's id from the number of a later attempt. Callers' ids may not contain it, so ids stay unique."""

MOST_PIECES = 256
"""Pieces kept per attempt. Then they are joined into one: for pieces of one token that takes a twentieth of the
memory."""


@dataclass(slots=True)
class OpenRequest:
    """One caller's request on its way."""

    asked: GenerationRequest  # as the caller sent it
    segments: list[Completion] = field(default_factory=list)  # what earlier attempts sampled
    pieces: list[Piece] = field(default_factory=list)  # pieces of the live attempt that the caller was shown
    attempts: int = 0
    attempt: GenerationRequest | None = None  # live now; None while waiting
    generator: str = ""
    cost: int = 0
    waiting_since: float = 0.0
    started: float = 0.0  # when the live attempt started
    seconds: float = 0.0  # spent in earlier attempts
    deaths: list[str] = field(default_factory=list)  # causes of death of generators that ran it
    given_up: bool = False  # aborted by the caller or out of time: the next answer is the last

    @property
    def sampled(self) -> int:
        """Tokens of earlier attempts."""
        return sum(len(part.token_ids) for part in self.segments)


def from_pieces(attempt_id: str, request: OpenRequest) -> Completion:
    """The completion of an attempt as if it had been interrupted after its last piece."""
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
    """Finish reason of an interrupted attempt: it may have sampled its last token already."""
    sampling = request.asked.sampling
    tokens = interrupted.token_ids
    if len(tokens) and int(tokens[-1]) in sampling.stop_token_ids and len(tokens) > sampling.min_new_tokens:
        return FinishReason.STOP
    if request.sampled + len(tokens) >= sampling.max_new_tokens:
        return FinishReason.LENGTH
    return FinishReason.ABORT


def next_attempt(request: OpenRequest) -> GenerationRequest:
    """The next attempt: the whole request, or the rest of it."""
    asked = request.asked
    if not request.attempts:
        return asked
    attempt = replace(asked, request_id=f"{asked.request_id}{ATTEMPT_MARK}{request.attempts}")
    if not request.segments:
        return attempt
    sampled = np.concatenate([segment.token_ids for segment in request.segments])
    return replace(
        attempt,
        prompt_token_ids=np.concatenate([asked.prompt_token_ids, sampled]),
        sampling=replace(asked.sampling, max_new_tokens=asked.sampling.max_new_tokens - len(sampled)),
        stream_from=asked.stream_from + len(sampled) if asked.streams else asked.stream_from,
    )


def stitch(request: OpenRequest, last: Completion | None) -> Completion:
    """All segments as one completion under the caller's id. Without `last` its finish reason is ABORT."""
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
