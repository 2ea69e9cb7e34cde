"""Applies decisions to an engine: the part of the loop that every rank runs, rank 0 included.

Each rank applies the same decisions in the same order, so all engines hold the same requests and sample the same
tokens. A pull has the same outcome on all ranks: a failure on one rank is sent to all before any continues, so that no
rank waits in a collective for one that gave up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from titan_rl.errors import LockstepError, WeightsError
from titan_rl.generation.decisions import LoopAction, LoopDecision
from titan_rl.generation.engine import Engine
from titan_rl.observability.timeline import timeline
from titan_rl.types import Completion, Piece, PolicyVersion
from titan_rl.weights.manifest import Publication

if TYPE_CHECKING:
    from torch import Tensor

_DIGEST_BYTES = 8

LoadPublication = Callable[[Publication], "Iterable[tuple[str, Tensor]]"]
"""Whole tensors of a publication under Hugging Face names; raises WeightsError."""
Verify = Callable[[Publication, Engine], int]
"""Compares the engine's weights with the manifest; returns the combined fingerprint or raises WeightsError. It runs on
all of the generator's ranks or on none, so it may use collectives."""


class DecisionChannel(Protocol):
    """Carries decisions from rank 0 to all ranks. Every rank calls the same methods in the same order."""

    def open(self) -> None:
        """Called once by every rank, after its engine is built."""

    def send(self, decision: LoopDecision) -> None:
        """Rank 0: hand a decision to every other rank."""

    def receive(self) -> LoopDecision:
        """Other ranks: wait for the next decision."""

    def gather_failures(self, failure: str) -> list[str]:
        """Exchange failures with all ranks; empty means success.

        Returns:
            One entry per rank, the same on all ranks.
        """

    def close(self) -> None:
        """Called once by every rank, before its engine is closed."""


class SoloChannel:
    """The channel of a generator with one rank: nothing is sent."""

    def open(self) -> None:
        pass

    def send(self, decision: LoopDecision) -> None:
        pass

    def receive(self) -> LoopDecision:
        raise RuntimeError("a generator of one rank has no follower")

    def gather_failures(self, failure: str) -> list[str]:
        return [failure]

    def close(self) -> None:
        pass


class RunningDigest:
    """64-bit digest of a rank's decisions and their results.

    Two ranks that applied the same decisions and computed the same results have equal digests. After any difference the
    digests stay different. Included are every decision, every sampled token of every step, and the fingerprint of every
    loaded version. Values that may differ between ranks (time, addresses) are not included.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    @property
    def value(self) -> int:
        """Unsigned 64-bit."""
        return int.from_bytes(self._hash.copy().digest(), "little")

    def add_decision(self, decision: LoopDecision) -> None:
        """A decision that is about to be applied."""
        version = "" if decision.publication is None else decision.publication.version
        self._hash.update(
            f"{decision.sequence}|{decision.action}|{decision.burst_steps}|{version}|{decision.abort}|".encode()
        )
        for request in decision.admit:
            self._hash.update(f"{request.request_id}|{request.seed}|{request.sampling}|".encode())
            self._hash.update(request.prompt_token_ids.astype(np.int32, copy=False).tobytes())

    def add_sampled(self, token_ids: np.ndarray) -> None:
        """Every token of one engine step, in the engine's order; [N] int32."""
        self._hash.update(token_ids.tobytes())

    def add_loaded(self, version: PolicyVersion, fingerprint: int | None) -> None:
        """The outcome of a pull; None: it failed."""
        self._hash.update(f"loaded|{version}|{fingerprint}|".encode())

    def check(self, decision: LoopDecision, rank: int) -> None:
        """Compare with rank 0, before `decision` is applied.

        Raises:
            LockstepError: this rank's decisions or results differ from rank 0's.
        """
        if decision.digest != self.value:
            raise LockstepError(
                f"rank {rank} differs from rank 0 before decision {decision.sequence} ({decision.action}): digest "
                f"{self.value:016x}, rank 0 has {decision.digest:016x}; the ranks sampled different tokens, loaded "
                f"different weights or applied different decisions"
            )


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
    """The results of one decision."""

    completions: list[Completion] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    """On rank 0: new pieces of running streamed requests."""
    pull: PullOutcome | None = None
    freed_bytes: int = 0


class Lockstep:
    """An engine, and the digest of everything that was applied to it."""

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
        self.engine = engine
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

    def apply(self, decision: LoopDecision) -> Outcome:
        """Apply a decision.

        Raises:
            LockstepError: this rank no longer agrees with rank 0, or missed a decision.
            Exception: the engine failed. Either is fatal for the generator.
        """
        if decision.sequence != self._decisions:
            raise LockstepError(f"rank {self._rank} got decision {decision.sequence} instead of {self._decisions}")
        self._digest.check(decision, self._rank)
        self._digest.add_decision(decision)
        self._decisions += 1
        engine = self.engine
        match decision.action:
            case LoopAction.STEP:
                return self._step(decision)
            case LoopAction.PULL_MODEL_STATE_DICT:
                return self._pull(decision)
            case LoopAction.SLEEP:
                timeline.doing("sleep")
                completions = engine.abort(engine.running())
                return Outcome(completions=completions, freed_bytes=engine.sleep())
            case LoopAction.WAKE:
                timeline.doing("wake")
                engine.wake()
                return self._pull(decision)
            case LoopAction.CLOSE:
                return Outcome(completions=engine.abort(engine.running()))
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
            self._digest.add_sampled(output.sampled)
            completions += output.finished
        return Outcome(completions=completions, pieces=engine.take_pieces() if self._rank == 0 else [])

    def _pull(self, decision: LoopDecision) -> Outcome:
        publication = decision.publication
        if publication is None:
            raise LockstepError(f"decision {decision.sequence} ({decision.action}) carries no publication")
        engine = self.engine
        pull = PullOutcome(publication=publication, requests_in_flight=len(engine.running()))
        timeline.doing("pull")
        started = self._clock()
        pull.error = self._together(publication, lambda: self._load(publication))
        copied = self._clock()
        pull.seconds_copied = copied - started
        fingerprint: int | None = None
        if pull.error is None:
            timeline.doing("verify")

            def verify() -> None:
                nonlocal fingerprint
                fingerprint = self._verify(publication, engine)

            pull.error = self._together(publication, verify)
            pull.seconds_verifying = self._clock() - copied
        self._digest.add_loaded(publication.version, None if pull.error else fingerprint)
        completions = engine.abort(engine.running()) if pull.error else []
        return Outcome(completions=completions, pull=pull)

    def _load(self, publication: Publication) -> None:
        self.engine.load_weights(self._load_publication(publication), publication.version)
        if not self._keep_cache:
            self.engine.drop_cache()

    def _together(self, publication: Publication, work: Callable[[], None]) -> WeightsError | None:
        """Do this rank's part, then exchange failures with all ranks. Returns the error if any rank failed."""
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
