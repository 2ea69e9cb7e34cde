"""One request over several attempts: makes the next attempt, and stitches all attempts into one completion.

The prompt of an attempt is the caller's prompt plus the tokens of earlier attempts; its budget is the rest; its seed is
the caller's. Noise depends on the seed and the position, so tokens that were lost are sampled again, and the rest is
what it would have been. An attempt that sampled a token has told the logprobs of the caller's prompt, where they are
asked for; later ones are not asked for them.
"""

from dataclasses import dataclass, replace

import numpy as np

from titan_rl.errors import GeneratorFailed
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece, sampled_arrays

ATTEMPT_MARK = "~"
"""Separates the caller's id from the number of a later attempt. Callers' ids may not contain it, so ids stay unique."""

MOST_PIECES = 256
"""Pieces kept of what was shown. Then they are joined: pieces of one token take a twentieth of the memory so."""

_SUMMED = {f"generation/{name}" for name in ("seconds_queued", "seconds_in_engine", "preemptions", "recomputed_tokens")}
"""Metrics that the parts of an answer add up to; of all others the first part tells, which has the caller's prompt."""


class Shown:
    """What somebody has seen of a completion: turns its pieces into its tokens, each once and in order.

    Pieces come in the order in which they were sampled, maybe twice: if the fleet does not resume, or its router was
    replaced, a lost completion is sampled again from its beginning. Tokens whose pieces were lost come with the
    completion. The logprobs and versions are those that were seen first; those of a second sampling may differ in the
    last digits. `start`: position of the first token in the whole completion.
    """

    def __init__(self, start: int = 0) -> None:
        self._pieces: list[Piece] = []
        self._end = start

    def add(self, piece: Piece) -> Piece | None:
        """The new part of a piece. None if nothing is new, or if tokens before it are missing."""
        if piece.offset > self._end or piece.end <= self._end:
            return None
        if known := self._end - piece.offset:
            piece = replace(piece, offset=self._end, **sampled_arrays(piece, start=known))
        self._end = piece.end
        self._pieces.append(piece)
        if len(self._pieces) == MOST_PIECES:
            self._pieces = [Piece.join(self._pieces)]
        return piece

    @property
    def whole(self) -> Piece | None:
        """All that was shown; None: nothing was."""
        return Piece.join(self._pieces) if self._pieces else None

    def rest(self, completion: Completion) -> Piece | None:
        """The part that was not shown yet; None if all was. Raises GeneratorFailed: it begins with other tokens."""
        tokens = completion.token_ids
        shown = self.whole
        if shown is not None and not np.array_equal(tokens[: self._end], shown.token_ids):
            lost = f"its generator was lost after {self._end} tokens were streamed"
            others = "those that were sampled in their place are others"
            raise GeneratorFailed(f"request {completion.request_id}: {lost}, and {others}")
        return self.add(Piece(request_id=completion.request_id, offset=0, **sampled_arrays(completion)))


@dataclass(slots=True)
class OpenRequest:
    """One caller's request on its way."""

    original: GenerationRequest  # as the caller sent it
    segments: tuple[Completion, ...] = ()  # what earlier attempts sampled
    shown: Shown | None = None  # of the live attempt, if it streams
    attempts: int = 0
    attempt: GenerationRequest | None = None  # live now; None while waiting
    generator: str = ""
    turn: int = 0  # its place among those that wait
    deaths: tuple[str, ...] = ()  # causes of death of generators that ran it
    given_up: bool = False  # aborted by the caller: the next answer is the last


def ending(request: OpenRequest, completion: Completion) -> FinishReason:
    """Finish reason of an interrupted attempt: it may have sampled its last token already."""
    sampling = request.original.sampling
    tokens = completion.token_ids
    if len(tokens) and int(tokens[-1]) in sampling.stop_token_ids and len(tokens) > sampling.min_new_tokens:
        return FinishReason.STOP
    if sum(len(part.token_ids) for part in (*request.segments, completion)) >= sampling.max_new_tokens:
        return FinishReason.LENGTH
    return FinishReason.ABORT


def next_attempt(request: OpenRequest) -> GenerationRequest:
    """The next attempt: the whole request, or the rest of it."""
    original = request.original
    if not request.attempts:
        return original
    attempt = replace(original, request_id=f"{original.request_id}{ATTEMPT_MARK}{request.attempts}")
    if not request.segments:
        return attempt
    sampled, sampling = np.concatenate([segment.token_ids for segment in request.segments]), original.sampling
    left = sampling.max_new_tokens - len(sampled)
    return replace(
        attempt,
        prompt_token_ids=np.concatenate([original.prompt_token_ids, sampled]),
        sampled=len(sampled),
        sampling=replace(sampling, max_new_tokens=left, prompt_logprobs=False),
        stream_from=original.stream_from + len(sampled) if original.streams else original.stream_from,
    )


def stitch(request: OpenRequest, last: Completion | None) -> Completion:
    """All segments as one completion under the caller's id. Without `last` its finish reason is ABORT."""
    parts = [*request.segments, *([last] if last is not None else [])]
    if len(parts) == 1 and parts[0].request_id == request.original.request_id:
        return parts[0]
    metrics = {"generation/segments": float(len(parts)), "generation/attempts": float(request.attempts)}
    for part in parts:
        for name, value in part.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value if name in _SUMMED else metrics.get(name, value)
    return Completion(
        request_id=request.original.request_id,
        finish_reason=last.finish_reason if last is not None else FinishReason.ABORT,
        generator=parts[-1].generator if parts else "",
        metrics=metrics,
        **sampled_arrays(*parts),
    )
