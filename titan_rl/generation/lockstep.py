"""Applies decisions to an engine: the part of the loop that every rank runs, rank 0 included.

Each rank applies the same decisions in the same order, so all engines hold the same requests and sample the same
tokens. A pull ends alike on all ranks: whatever goes wrong on one is told to all before any goes on, so that none
waits in a collective for a rank that gave up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titan_rl.errors import LockstepError, WeightsError
from titan_rl.generation.channel import DecisionChannel
from titan_rl.generation.decisions import LoopAction, LoopDecision
from titan_rl.generation.digest import RunningDigest
from titan_rl.generation.engine import Engine
from titan_rl.types import Completion, Piece
from titan_rl.weights.manifest import Publication

if TYPE_CHECKING:
    from torch import Tensor

LoadPublication = Callable[[Publication], "Iterable[tuple[str, Tensor]]"]
"""Whole tensors of a publication under Hugging Face names; raises WeightsError."""
Verify = Callable[[Publication, Engine], int]
"""Compares what the engine serves with the manifest; raises WeightsError; returns the combined fingerprint. May use
collectives over the generator's ranks: it runs on all of them or on none."""


@dataclass(slots=True, kw_only=True)
class PullOutcome:
    """How one pull went, on this rank."""

    publication: Publication
    requests_in_flight: int
    seconds_copied: float = 0.0
    seconds_verifying: float = 0.0
    error: WeightsError | None = None
    """Set when any rank failed: then nothing may be served."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one decision led to."""

    completions: list[Completion] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    """On rank 0: what requests that stream and go on have sampled."""
    pull: PullOutcome | None = None
    freed_bytes: int = 0


class Lockstep:
    """An engine, and the digest of what was done with it."""

    def __init__(
        self,
        engine: Engine,
        *,
        rank: int,
        channel: DecisionChannel,
        load_publication: LoadPublication,
        verify: Verify,
        keep_cache: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            keep_cache: whether KV of older weights stays in use after a pull; see `GeneratorConfig.keep_prefix_cache`.
        """
        self._engine = engine
        self._rank = rank
        self._channel = channel
        self._load_publication = load_publication
        self._verify = verify
        self._keep_cache = keep_cache
        self._clock = clock
        self._digest = RunningDigest()
        self._decisions = 0

    @property
    def digest(self) -> int:
        """Of everything up to the last applied decision and what came of it."""
        return self._digest.value

    @property
    def decisions(self) -> int:
        """Applied so far."""
        return self._decisions

    def apply(self, decision: LoopDecision) -> Outcome:
        """Do what was decided.

        Raises:
            LockstepError: this rank no longer agrees with rank 0, or missed a decision.
            Exception: the engine failed. Either is fatal for the generator.
        """
        if decision.sequence != self._decisions:
            raise LockstepError(f"rank {self._rank} got decision {decision.sequence} instead of {self._decisions}")
        self._digest.check(decision, self._rank)
        self._digest.add_decision(decision)
        self._decisions += 1
        engine = self._engine
        match decision.action:
            case LoopAction.STEP:
                return self._step(decision)
            case LoopAction.PULL_MODEL_STATE_DICT:
                return self._pull(decision)
            case LoopAction.SLEEP:
                completions = engine.abort(engine.running())
                return Outcome(completions=completions, freed_bytes=engine.sleep())
            case LoopAction.WAKE:
                engine.wake()
                return self._pull(decision)
            case LoopAction.CLOSE:
                return Outcome(completions=engine.abort(engine.running()))
            case LoopAction.IDLE:
                return Outcome()

    def _step(self, decision: LoopDecision) -> Outcome:
        engine = self._engine
        completions = engine.abort(decision.abort) if decision.abort else []
        for request in decision.admit:
            engine.add(request)
        for _ in range(decision.burst_steps):
            if not engine.has_work():
                break
            output = engine.step()
            self._digest.add_sampled(output.sampled)
            completions += output.finished
        return Outcome(completions=completions, pieces=engine.take_pieces() if self._rank == 0 else [])

    def _pull(self, decision: LoopDecision) -> Outcome:
        publication = decision.publication
        if publication is None:
            raise LockstepError(f"decision {decision.sequence} ({decision.action}) carries no publication")
        engine = self._engine
        pull = PullOutcome(publication=publication, requests_in_flight=len(engine.running()))
        started = self._clock()
        pull.error = self._together(publication, lambda: self._load(publication))
        copied = self._clock()
        pull.seconds_copied = copied - started
        fingerprint: int | None = None
        if pull.error is None:

            def verify() -> None:
                nonlocal fingerprint
                fingerprint = self._verify(publication, engine)

            pull.error = self._together(publication, verify)
            pull.seconds_verifying = self._clock() - copied
        self._digest.add_loaded(publication.version, None if pull.error else fingerprint)
        completions = engine.abort(engine.running()) if pull.error else []
        return Outcome(completions=completions, pull=pull)

    def _load(self, publication: Publication) -> None:
        self._engine.load_weights(self._load_publication(publication), publication.version)
        if not self._keep_cache:
            self._engine.drop_cache()

    def _together(self, publication: Publication, work: Callable[[], None]) -> WeightsError | None:
        """Do this rank's part, then learn how all ranks fared."""
        cause: Exception | None = None
        try:
            work()
        except Exception as error:
            cause = error
        failures = self._channel.gather_failures("" if cause is None else f"{type(cause).__name__}: {cause}")
        told = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
        if not told:
            return None
        failed = WeightsError(f"{publication.channel} {publication.version} cannot be served: {'; '.join(told)}")
        failed.__cause__ = cause
        return failed
