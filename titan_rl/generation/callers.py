"""Who waits for what comes of a decision. Every future here is resolved by the engine thread, exactly once."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from titan_rl.generation.lockstep import PullOutcome
from titan_rl.generation.reports import PullReport
from titan_rl.types import PolicyVersion


def promise() -> Future[Any]:
    """A future that its holder cannot cancel: the engine thread will resolve it, whoever still waits."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, kw_only=True)
class PullCaller:
    """Somebody who waits for a pull or a wake-up."""

    version: PolicyVersion
    asked_at: float
    future: Future[PullReport] = field(default_factory=promise)

    def tell(self, pull: PullOutcome, decided_at: float) -> None:
        """Resolve with the outcome of a pull of this or a newer version."""
        if pull.error is not None:
            self.future.set_exception(pull.error)
            return
        self.future.set_result(
            PullReport(
                version=pull.publication.version,
                superseded=self.version != pull.publication.version,
                seconds_waited=max(0.0, decided_at - self.asked_at),
                seconds_copied=pull.seconds_copied,
                seconds_verifying=pull.seconds_verifying,
                bytes=pull.publication.manifest.nbytes,
                requests_in_flight=pull.requests_in_flight,
            )
        )


@dataclass(slots=True)
class Callers:
    """Who is to hear what comes of one decision."""

    pull: list[PullCaller] = field(default_factory=list)
    sleep: list[Future[int]] = field(default_factory=list)
