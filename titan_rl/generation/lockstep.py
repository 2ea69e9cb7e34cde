"""Applies decisions to an engine: the part of the loop that every rank runs, rank 0 included.

Each rank applies the same decisions in the same order, so all engines hold the same requests and sample the same
tokens. A pull has the same outcome on all ranks (`Ranks.together`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from titan_rl.errors import InvariantError, WeightsError
from titan_rl.generation.decisions import LoopAction, LoopDecision
from titan_rl.generation.engine import Engine
from titan_rl.metrics.timeline import timeline
from titan_rl.types import Completion, Piece
from titan_rl.weights.manifest import Publication

if TYPE_CHECKING:
    from torch import Tensor

    from titan_rl.weights.ranks import Ranks

_DIGEST_BYTES = 8


@dataclass(slots=True, kw_only=True)
class Outcome:
    completions: list[Completion] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    """On rank 0: new pieces of running streamed requests."""
    pull_error: WeightsError | None = None
    """Any rank failed to load or verify the publication: nothing may be served."""
    freed_bytes: int = 0


@dataclass(eq=False)
class Lockstep:
    """An engine, and the digest of everything that was applied to it."""

    engine: Engine
    rank: int
    ranks: Ranks
    load_publication: Callable[[Publication], Iterable[tuple[str, Tensor]]]
    """Whole tensors under Hugging Face names. Raises WeightsError."""
    verify: Callable[[Publication, Engine], int]
    """Compares the engine's weights with the manifest; returns the combined fingerprint. It runs on all ranks or on
    none, so it may use collectives. Raises WeightsError."""
    keep_cache: bool = False
    """`GeneratorConfig.keep_prefix_cache`."""

    def __post_init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    @property
    def digest(self) -> int:
        """Unsigned 64-bit, of every decision, every sampled token and the fingerprint of every loaded version: equal on
        ranks that did the same, different for good after any difference."""
        return int.from_bytes(self._hash.copy().digest(), "little")

    def apply(self, decision: LoopDecision) -> Outcome:
        """Apply a decision. Whatever it raises is fatal for the generator: InvariantError where this rank no longer
        agrees with rank 0 or missed a decision, or the engine's own error."""
        if decision.digest != self.digest:
            raise InvariantError(
                f"rank {self.rank} differs from rank 0 before decision {decision.sequence} ({decision.action}): "
                f"digest {self.digest:016x}, rank 0 has {decision.digest:016x}; the ranks sampled different tokens, "
                "loaded different weights or applied different decisions"
            )
        version = "" if decision.publication is None else decision.publication.version
        self._hash.update(
            f"{decision.sequence}|{decision.action}|{decision.burst_steps}|{version}|{decision.abort}|".encode()
        )
        for request in decision.admit:
            self._hash.update(f"{request.request_id}|{request.seed}|{request.sampling}|".encode())
            self._hash.update(request.prompt_token_ids.astype(np.int32, copy=False).tobytes())
        match decision.action:
            case LoopAction.STEP:
                return self._step(decision)
            case LoopAction.PULL_MODEL_STATE_DICT:
                return self._pull(decision)
            case LoopAction.SLEEP:
                timeline.doing("sleep")
                completions = self.engine.abort(self.engine.running())
                return Outcome(completions=completions, freed_bytes=self.engine.sleep())
            case LoopAction.WAKE:
                timeline.doing("wake")
                self.engine.wake()
                return self._pull(decision)
            case LoopAction.CLOSE:
                return Outcome(completions=self.engine.abort(self.engine.running()))
            case LoopAction.IDLE:
                return Outcome()

    def _step(self, decision: LoopDecision) -> Outcome:
        engine = self.engine
        timeline.doing("prefill" if decision.admit else "decode")
        completions = engine.abort(decision.abort) if decision.abort else []
        for request in decision.admit:
            engine.add(request)
        for _ in range(decision.burst_steps):
            if not engine.has_work():
                break
            output = engine.step()
            timeline.doing("decode")
            self._hash.update(output.sampled.tobytes())
            completions += output.finished
        return Outcome(completions=completions, pieces=engine.new_pieces() if self.rank == 0 else [])

    def _pull(self, decision: LoopDecision) -> Outcome:
        publication = decision.publication
        assert publication is not None
        timeline.doing("pull")
        fingerprint, error = None, None
        what = f"{publication.channel} {publication.version} cannot be served"
        try:
            self.ranks.together(what, lambda: self._load(publication))
            timeline.doing("verify")
            fingerprint = self.ranks.together(what, lambda: self.verify(publication, self.engine))
        except WeightsError as failure:
            error = failure
        self._hash.update(f"loaded|{publication.version}|{fingerprint}|".encode())  # None: it failed
        completions = self.engine.abort(self.engine.running()) if error else []
        return Outcome(completions=completions, pull_error=error)

    def _load(self, publication: Publication) -> None:
        # Read after the engine has drained: where reading fails on one rank, all have taken the same steps.
        tensors = chain.from_iterable(map(self.load_publication, (publication,)))
        self.engine.load_weights(tensors, publication.version)
        if not self.keep_cache:
            self.engine.drop_cache()
