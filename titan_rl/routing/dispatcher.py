"""Assigns requests to generators, from arrival to answer, over as many attempts as needed.

Always true, after every method:

- a request is in exactly one place: waiting, or live as one attempt on one generator. It leaves exactly once: with an
  answer, with an error, or withdrawn by its caller;
- a generator's load is the sum of the estimated costs of its live attempts, so it is 0 when none is live;
- an attempt goes only to a generator whose version the request allows, and its id is never reused;
- what happens to one request costs nothing per generator or per other request, but the logarithm in the strategy;
- a request for an exact version is never live on a generator that takes new weights while it serves;
- at most `request_retries` + 1 generators die under one request, however often it is interrupted;
- with `resume`, a completion begins with the tokens that its caller was shown, even if their generator is lost.

An attempt that ends early through no fault of the request continues as a new one (`attempts`):

    submit([r])                     → [Assignment(g0, r)]
    completed(r, 3 tokens, ABORT)   → None                               g0 was interrupted
    reconsider()                    → [Assignment(g1, r~1)]              the prompt and those 3 tokens
    completed(r~1, 4 tokens, STOP)  → Completion(r, 7 tokens, STOP)      versions of both

Pure: methods return what to send, and the actor sends it. Requests that get an error instead of an answer are in
`failures`; call it after every method.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from titan_rl.errors import RequestError, RequestLost, TitanError
from titan_rl.routing.attempts import ATTEMPT_MARK, OpenRequest, Shown, ending, next_attempt, stitch
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.health import Fleet, Phase
from titan_rl.routing.strategies import RoutingStrategy
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece, PolicyVersion, sampled_arrays


class Assignment(NamedTuple):
    """Send `request` (an attempt with its own id) to `generator`."""

    generator: str
    request: GenerationRequest


def estimated_cost(request: GenerationRequest) -> int:
    """Estimated work of a request in tokens: the prompt plus the most it may sample."""
    return len(request.prompt_token_ids) + request.sampling.max_new_tokens


_Need = tuple[PolicyVersion | None, PolicyVersion]
"""What decides which versions a request allows: exactly one, or all from one on."""


def _need(request: OpenRequest) -> _Need:
    return request.original.exact_version, request.original.min_version


def _allow(waiting: dict[str, OpenRequest], version: PolicyVersion) -> bool:
    """Whether some requests of one need allow this version."""
    return next(iter(waiting.values())).original.allows(version)


class Dispatcher:
    """Bookkeeping of one router."""

    def __init__(self, strategy: RoutingStrategy, fleet: Fleet, config: RouterConfig) -> None:
        self._strategy = strategy
        self._config = config
        self._fleet = fleet
        self._requests: dict[str, OpenRequest] = {}  # by the caller's id
        self._waiting: dict[_Need, dict[str, OpenRequest]] = {}  # requests without a live attempt, in their turn
        self._turns = itertools.count()
        self._attempts: dict[str, OpenRequest] = {}  # live, by attempt id
        self._on: dict[str, dict[str, None]] = {}  # generator → its live attempt ids, oldest first
        self._load: Counter[str] = Counter()
        self._failures: list[tuple[str, TitanError]] = []

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def demanded(self, versions: Collection[PolicyVersion]) -> set[PolicyVersion]:
        """Those of the versions that some waiting request allows."""
        return {version for version in versions if any(_allow(waiting, version) for waiting in self._waiting.values())}

    def load(self, generator: str) -> int:
        """Estimated tokens in flight."""
        return self._load[generator]

    def in_flight(self, generator: str) -> int:
        """Live attempts."""
        return len(self._on.get(generator, ()))

    def live_on(self, generator: str) -> list[str]:
        """Ids of the live attempts, oldest first."""
        return list(self._on.get(generator, ()))

    def runs_exact(self, generator: str) -> bool:
        """Whether a request for an exact version is live there."""
        return any(self._attempts[each].original.exact_version is not None for each in self._on.get(generator, ()))

    def failures(self) -> list[tuple[str, TitanError]]:
        """Requests that failed since the last call: the caller's id, and why."""
        failures, self._failures = self._failures, []
        return failures

    def submit(self, requests: Iterable[GenerationRequest]) -> list[Assignment]:
        """Requests arrive. One that no generator can serve now waits; one that is refused fails."""
        assignments: list[Assignment] = []
        for original in requests:
            if (why := self._refusal(original)) is not None:
                self._failures.append((original.request_id, why))
                continue
            request = self._requests[original.request_id] = OpenRequest(original)
            if (assignment := self._assign(request)) is not None:
                assignments.append(assignment)
            elif original.request_id in self._requests:
                self._wait(request)
        return assignments

    def reconsider(self) -> list[Assignment]:
        """Assign waiting requests that can be served now. Call it when a generator begins to serve."""
        served = self._fleet.served
        able = [each for each in self._waiting.values() if any(_allow(each, version) for version in served)]
        assignments: list[Assignment] = []
        for request in sorted((request for waiting in able for request in waiting.values()), key=attrgetter("turn")):
            if (assignment := self._assign(request)) is not None:
                self._stop_waiting(request)
                assignments.append(assignment)
        return assignments

    def ended_whole(self, attempt_id: str, reason: FinishReason) -> bool:
        """An attempt ended for this reason. Returns whether its completion is the whole answer as it is: the request's
        first attempt, not interrupted. Then the request is over; if not, `completed` follows."""
        request = self._attempts.get(attempt_id)
        whole = request is not None and request.attempts == 1 and reason is not FinishReason.ABORT
        return whole and self.ended(attempt_id) is not None

    def completed(self, attempt_id: str, completion: Completion) -> Completion | None:
        """An attempt ended with these tokens. Returns the whole completion, under the caller's id; None if the request
        needs another attempt (it waits for `reconsider`), or if the attempt is not live (a late answer)."""
        request = self._release(attempt_id)
        if request is None:
            return None
        if completion.finish_reason is FinishReason.ABORT and not request.given_up:
            completion = replace(completion, finish_reason=ending(request, completion))
        if completion.finish_reason is not FinishReason.ABORT or request.given_up:
            del self._requests[request.original.request_id]
            return stitch(request, completion)
        if self._config.resume and len(completion.token_ids):
            request.segments += (completion,)
        self._wait(request)
        return None

    def shown(self, piece: Piece) -> Piece | None:
        """An attempt has sampled a piece. Returns it under the caller's id, to be shown; None if the attempt is not
        live, or if `resume` is on and tokens before the piece are missing, so that it could not be kept."""
        request = self._attempts.get(piece.request_id)
        if request is None:
            return None
        if self._config.resume and request.shown is not None:
            new = request.shown.add(piece)
            if new is None:
                return None
            piece = new
        first = piece.request_id == request.original.request_id
        return piece if first else replace(piece, request_id=request.original.request_id)

    def ended(self, attempt_id: str) -> str | None:
        """The attempt ended and the request with it. Returns the caller's id; None if the attempt is not live."""
        request = self._release(attempt_id)
        if request is None:
            return None
        del self._requests[request.original.request_id]
        return request.original.request_id

    def lost(self, attempt_id: str, died: str = "") -> Completion | None:
        """The attempt ended without an answer. Its tokens are lost, except those that the caller was shown. `died`: why
        its generator died; empty: the generator lives but serves nothing now. Returns the tokens so far, if the request
        was given up or its last token was shown. If not, None: the request waits for another attempt, or has failed
        because more than `request_retries` generators died under it."""
        request = self._attempts.get(attempt_id)
        if request is None:
            return None
        shown = request.shown.whole if request.shown is not None else None
        kept = sampled_arrays(shown) if shown is not None else sampled_arrays()
        abort, generator = FinishReason.ABORT, request.generator
        cut = Completion(request_id=attempt_id, finish_reason=abort, generator=generator, **kept)
        if (whole := self.completed(attempt_id, cut)) is not None:
            return whole
        if died:
            request.deaths += (died,)
            if len(request.deaths) > self._config.request_retries:
                deaths = f"{len(request.deaths)} generators died under it ({'; '.join(request.deaths)})"
                limit = f"no other one gets it (router.request_retries = {self._config.request_retries})"
                self._fail(request, RequestLost(f"request {request.original.request_id}: {deaths}, and {limit}"))
        return None

    def abort(self, request_id: str) -> Assignment | Completion | None:
        """The caller gives up. Returns the live attempt to abort, whose answer will be the last; or, if it was waiting,
        the final completion; None if the id is unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.given_up = True
        if request.attempt is not None:
            return Assignment(request.generator, request.attempt)
        self._stop_waiting(request)
        del self._requests[request_id]
        return stitch(request, None)

    def drop_waiting(self) -> list[str]:
        """Remove all waiting requests; returns the callers' request ids."""
        dropped = [request_id for waiting in self._waiting.values() for request_id in waiting]
        for request_id in dropped:
            del self._requests[request_id]
        self._waiting.clear()
        return dropped

    def _refusal(self, request: GenerationRequest) -> RequestError | None:
        if ATTEMPT_MARK in request.request_id:
            return RequestError(f"request id {request.request_id} must not contain {ATTEMPT_MARK!r}: attempts do")
        if self._config.resume and request.sampling.depends_on_output:
            why = "penalties and min_new_tokens depend on past output, which a resumed completion does not see as such"
            return RequestError(f"request {request.request_id}: {why}; set router.resume = false to use them")
        return None

    def _wait(self, request: OpenRequest) -> None:
        request.turn = next(self._turns)
        self._waiting.setdefault(_need(request), {})[request.original.request_id] = request

    def _stop_waiting(self, request: OpenRequest) -> None:
        need = _need(request)
        if (waiting := self._waiting.get(need)) is not None:
            waiting.pop(request.original.request_id, None)
            if not waiting:
                del self._waiting[need]

    def _fail(self, request: OpenRequest, error: TitanError) -> None:
        """Fail a request that is not live."""
        self._stop_waiting(request)
        del self._requests[request.original.request_id]
        self._failures.append((request.original.request_id, error))

    def _assign(self, request: OpenRequest) -> Assignment | None:
        """Assign a request to a generator that can serve it now, if there is one. It fails if the strategy raises."""
        original = request.original
        try:
            choice = self._strategy.choose(original)
        except Exception as why:
            reason = f"the routing strategy raised {type(why).__name__}: {why}"
            self._fail(request, RequestError(f"request {original.request_id}: {reason}"))
            return None
        if choice is None:
            return None
        if original.exact_version is not None and self._fleet[choice].phase is Phase.SWAPPING:
            return None
        attempt = next_attempt(request)
        request.attempts += 1
        request.attempt, request.generator = attempt, choice
        if attempt.stream_from >= 0:
            request.shown = Shown(attempt.stream_from)
        self._attempts[attempt.request_id] = request
        self._on.setdefault(choice, {})[attempt.request_id] = None
        load = self._load[choice] = self._load[choice] + estimated_cost(attempt)
        self._strategy.assigned(original, choice, load)
        return Assignment(choice, attempt)

    def _release(self, attempt_id: str) -> OpenRequest | None:
        request = self._attempts.pop(attempt_id, None)
        if request is None:
            return None
        original, generator, attempt = request.original, request.generator, request.attempt
        assert attempt is not None
        del self._on[generator][attempt_id]
        load = self._load[generator] = self._load[generator] - estimated_cost(attempt)
        request.attempt, request.generator = None, ""
        self._strategy.released(original, generator, load)
        return request
