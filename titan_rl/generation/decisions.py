"""Decides what all ranks of a generator do next. Rank 0 decides, all ranks apply. Nothing here waits, loads or samples.

Invariants, whatever the order of calls:

- Every submitted request leaves the inbox exactly once: admitted by one STEP, handed back by `abort`, or handed back
  by `interrupt`. Requests are admitted in the order of submission.
- A request is admitted only while a verified version is served, and only `verified` makes one served.
- CLOSE > SLEEP and WAKE > PULL_MODEL_STATE_DICT > STEP > IDLE; sequence numbers rise by one per decision.
- Of several waiting pulls only the last one is loaded. It may be older: the router knows what is to be served.

    submit(a)  pull(v0)      -> 0 PULL v0      (a waits: nothing is served before weights are verified)
    verified(v0)             -> 1 STEP admit a
    pull(v1)   submit(b)     -> 2 PULL v1      (between two steps; a keeps its tokens)
    verified(v1)             -> 3 STEP admit b
                             -> 4 IDLE         (a heartbeat, once a and b have finished)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from titan_rl.errors import GeneratorFailed, GeneratorNotServing, RequestError
from titan_rl.types import GenerationRequest, PolicyVersion
from titan_rl.weights.manifest import Publication

_ASLEEP = "asleep: wake it up with a publication first"


class LoopAction(StrEnum):
    """What one decision makes every rank do."""

    STEP = "step"
    """Abort, admit, then run a burst of engine steps."""
    PULL_MODEL_STATE_DICT = "pull_model_state_dict"
    """Load a publication between two steps, drop the KV of the old weights (unless it is to be kept), verify, serve."""
    SLEEP = "sleep"
    """Abort everything and free as much memory as the engine can."""
    WAKE = "wake"
    """Allocate the memory again and pull."""
    IDLE = "idle"
    """Nothing to do: a heartbeat, so that no follower's collective times out."""
    CLOSE = "close"
    """Abort everything and end the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    """One entry of the log that all ranks of a generator apply in the same order."""

    sequence: int
    """Position in the log, from 0."""
    action: LoopAction
    admit: tuple[GenerationRequest, ...] = ()
    """STEP: requests that join now, in this order."""
    abort: tuple[str, ...] = ()
    """STEP: ids of requests to abort before the admissions."""
    publication: Publication | None = None
    """PULL_MODEL_STATE_DICT and WAKE: what to load."""
    burst_steps: int = 0
    """STEP: engine steps to run; fewer when the engine runs out of work."""
    digest: int = 0
    """Rank 0's digest of everything before this decision; followers compare it with their own."""


class DecisionMaker:
    """Rank 0's inbox. Callers put in requests and commands; `decide` takes out the next decision; the engine loop
    reports its outcome. Not thread-safe: the loop calls it under one lock.
    """

    def __init__(self, *, burst_steps: int = 1) -> None:
        self._burst_steps = burst_steps
        self._sequence = 0
        self.version: PolicyVersion | None = None
        """The verified version that is served; None while nothing is."""
        self._refusal = ""  # why requests are refused; empty: they are served, or wait for the first weights
        self._waiting: dict[str, GenerationRequest] = {}
        self._admitted: set[str] = set()
        self._aborts: dict[str, None] = {}  # an ordered set
        self._change: LoopAction | None = None  # PULL, SLEEP or WAKE that is requested and not decided yet
        self._publication: Publication | None = None  # for that change
        self._closing = False

    # What callers want. Each of these raises GeneratorFailed once `close` was called.

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request that was validated. Raises RequestError: one of this id is waiting or running;
        GeneratorNotServing: asleep or stale."""
        self._refuse_when_closing()
        if self._refusal or self._change is LoopAction.SLEEP:
            raise GeneratorNotServing(self._refusal or _ASLEEP)
        if request.request_id in self._waiting or request.request_id in self._admitted:
            raise RequestError(f"request id {request.request_id!r} is already in use by a live request")
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> GenerationRequest | None:
        """Abort a request. Returns it if it was still waiting, so that no engine has seen it; None if the engine has it
        (the next STEP aborts it) or the id is not live (it may just have finished)."""
        self._refuse_when_closing()
        request = self._waiting.pop(request_id, None)
        if request is None and request_id in self._admitted:
            self._aborts[request_id] = None
        return request

    def pull(self, publication: Publication) -> None:
        """Ask for a publication. Raises GeneratorNotServing if asleep (`wake` pulls) or about to be."""
        self._refuse_when_closing()
        waking = self._change is LoopAction.WAKE
        if self._change is LoopAction.SLEEP or (self._refusal == _ASLEEP and not waking):
            raise GeneratorNotServing(_ASLEEP)
        self._change = LoopAction.WAKE if waking else LoopAction.PULL_MODEL_STATE_DICT
        self._publication = publication

    def sleep(self) -> None:
        """Ask to sleep. A pull that waits is dropped. Raises GeneratorNotServing while a wake-up is under way."""
        self._refuse_when_closing()
        if self._change is LoopAction.WAKE:
            raise GeneratorNotServing("waking up: wait for that before the next sleep")
        self._change, self._publication = LoopAction.SLEEP, None

    def wake(self, publication: Publication) -> None:
        """Ask to wake up with a publication, the only way out of sleep. Raises GeneratorNotServing while falling
        asleep."""
        self._refuse_when_closing()
        if self._change is LoopAction.SLEEP:
            raise GeneratorNotServing("falling asleep: wait for that before waking it up")
        self._change, self._publication = LoopAction.WAKE, publication

    def close(self) -> None:
        """Ask to end. From now on everything else is refused."""
        self._closing = True

    # What happens next.

    def next_action(self, engine_has_work: bool) -> LoopAction:
        """What `decide` would decide."""
        if self._closing:
            return LoopAction.CLOSE
        if self._change is not None:
            return self._change
        if self.version is not None and (engine_has_work or self._aborts or any(self._admissible())):
            return LoopAction.STEP
        return LoopAction.IDLE

    def decide(self, engine_has_work: bool, digest: int = 0) -> LoopDecision:
        """Take the next decision out of the inbox. `digest`: this rank's, of everything so far."""
        action = self.next_action(engine_has_work)
        decision = LoopDecision(sequence=self._sequence, action=action, digest=digest)
        self._sequence += 1
        match action:
            case LoopAction.STEP:
                admit, abort = tuple(self._admissible()), tuple(self._aborts)
                self._aborts.clear()
                for request in admit:
                    del self._waiting[request.request_id]
                    self._admitted.add(request.request_id)
                steps = 1 if any(request.streams for request in admit) else self._burst_steps  # the first token leaves
                return replace(decision, admit=admit, abort=abort, burst_steps=steps)
            case LoopAction.PULL_MODEL_STATE_DICT | LoopAction.WAKE:
                decision = replace(decision, publication=self._publication)
                self._change = self._publication = None
            case LoopAction.SLEEP:
                self._change = self.version = None
                self._refusal = _ASLEEP
            case LoopAction.CLOSE:
                self._change = self._publication = self.version = None
            case LoopAction.IDLE:
                pass
        return decision

    # What came of it.

    def verified(self, version: PolicyVersion) -> None:
        """A pull was loaded and verified: serve it."""
        self.version = version
        self._refusal = ""

    def failed(self, reason: str) -> None:
        """A pull failed: what the engine holds is unknown, so nothing is served."""
        self.version = None
        self._refusal = f"stale: {reason}"

    def finished(self, request_id: str) -> None:
        """The engine is done with an admitted request, whatever the reason."""
        self._admitted.discard(request_id)
        self._aborts.pop(request_id, None)

    def interrupt(self) -> list[GenerationRequest]:
        """Take out every request that still waits, in order: after SLEEP, CLOSE or a failed pull."""
        interrupted, self._waiting = self._waiting, {}
        return list(interrupted.values())

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise GeneratorFailed("the generator was closed")

    def _admissible(self) -> Iterator[GenerationRequest]:
        """Requests that allow the served version; the others wait for a pull."""
        version = self.version
        return (request for request in self._waiting.values() if version is not None and request.allows(version))
