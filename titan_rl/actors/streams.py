"""Turns the pieces of a completion into its tokens, each once.

Pieces come in the order in which they were sampled. If the fleet does not resume, a lost completion is sampled again
from its beginning; pieces with tokens that were already shown are skipped. Tokens whose pieces were lost come with the
completion. The caller keeps the logprobs and versions that it saw first; those of a second sampling may differ in the
last digits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from titan_rl.errors import GeneratorFailed
from titan_rl.types import Completion, Piece


class Shown:
    """The prefix of one completion that its caller has seen, without a gap."""

    def __init__(self) -> None:
        self._token_ids: list[np.ndarray] = []
        self._end = 0

    def add(self, piece: Piece) -> Piece | None:
        """The new part of a piece. None if nothing is new, or if tokens before it are missing."""
        if piece.offset > self._end or piece.end <= self._end:
            return None
        known = self._end - piece.offset
        self._end = piece.end
        new = replace(
            piece,
            offset=piece.offset + known,
            token_ids=piece.token_ids[known:],
            logprobs=piece.logprobs[known:],
            versions=piece.versions[known:],
        )
        self._token_ids.append(new.token_ids)
        return new

    def rest(self, completion: Completion) -> Piece | None:
        """The part of the whole completion that was not shown yet; None if all of it was.

        Raises:
            GeneratorFailed: the completion does not begin with the shown tokens.
        """
        tokens = completion.token_ids
        if self._token_ids and not np.array_equal(tokens[: self._end], np.concatenate(self._token_ids)):
            raise GeneratorFailed(
                f"request {completion.request_id}: its generator was lost after {self._end} tokens were streamed, and "
                f"those that were sampled in their place are others"
            )
        whole = Piece(
            request_id=completion.request_id,
            offset=0,
            token_ids=tokens,
            logprobs=completion.logprobs,
            versions=completion.versions,
        )
        return self.add(whole)
