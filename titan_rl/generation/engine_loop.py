"""The loop that drives one rank's engine, in one thread of its own.

Consumes: requests, aborts, pulls, sleep, wake-up and close, from any thread (rank 0); decisions of rank 0 (others).
Waits for: work, on rank 0 for at most a heartbeat; the next decision, on the others.
Is woken by: every call that puts something into the inbox.
Produces: completions through `on_completions`, pieces of those that stream through `on_pieces`, reports through futures
(rank 0 only).
On failure: everything outstanding and everything later fails at once with the cause, and `on_fatal` is told.

The engine is built, stepped, loaded and closed in this thread and nowhere else, and so are all collectives; the
caller's threads are never blocked by a step. A request id that `submit` accepted comes back exactly once: as a
completion, or through `on_fatal`. Pieces of a request come before its completion, in order, and each token in one at
most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from titan_rl.errors import GeneratorFailed, GeneratorNotServing, RequestError
from titan_rl.generation.callers import Callers, PullCaller, promise
from titan_rl.generation.channel import DecisionChannel
from titan_rl.generation.decisions import DecisionMaker, LoopAction, LoopDecision, ServingState
from titan_rl.generation.engine import Engine
from titan_rl.generation.lockstep import LoadPublication, Lockstep, Outcome, PullOutcome, Verify
from titan_rl.generation.reports import LoopStatus, PullReport
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece
from titan_rl.weights.manifest import Publication


class EngineLoop:
    """One rank's engine thread.

    Args:
        make_engine: builds the engine, in the engine thread.
        rank: of this process within its generator.
        world_size: ranks of the generator.
        burst_steps: engine steps per decision; with one rank there is no broadcast to amortise and each decision
            is one step.
        heartbeat_seconds: an idle rank 0 sends a decision at least this often.
        channel: carries decisions from rank 0 to the others.
        load_publication: reads a publication; see `lockstep.LoadPublication`.
        verify: checks what the engine serves; see `lockstep.Verify`.
        keep_cache: whether a pull leaves the KV of older weights in use; see `GeneratorConfig.keep_prefix_cache`.
        on_completions: rank 0 gets finished and aborted requests here, in the engine thread (in the thread that
            calls `abort` for a request that never reached the engine). It must be quick and must not raise.
        on_pieces: the same for what requests that stream have sampled, once per decision.
        on_fatal: told once, on any rank, when the loop has died after it had started. A follower's process must
            exit then: that is how rank 0 hears of it before a collective times out.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        rank: int,
        world_size: int,
        burst_steps: int,
        heartbeat_seconds: float,
        channel: DecisionChannel,
        load_publication: LoadPublication,
        verify: Verify,
        on_completions: Callable[[list[Completion]], None],
        on_pieces: Callable[[list[Piece]], None],
        on_fatal: Callable[[BaseException], None],
        keep_cache: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_engine = make_engine
        self._rank = rank
        self._heartbeat_seconds = heartbeat_seconds
        self._channel = channel
        self._load_publication = load_publication
        self._verify = verify
        self._keep_cache = keep_cache
        self._on_completions = on_completions
        self._on_pieces = on_pieces
        self._on_fatal = on_fatal
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below
        self._inbox = DecisionMaker(burst_steps=burst_steps if world_size > 1 else 1)
        self._submitted_at: dict[str, float] = {}  # of waiting requests
        self._queued_for: dict[str, float] = {}  # of requests in the engine
        self._pull_callers: list[PullCaller] = []
        self._sleep_callers: list[Future[int]] = []
        self._callers = Callers()  # of the decision that is being applied
        self._failure: BaseException | None = None
        self._engine: Engine | None = None
        self._progress = (0, 0)  # decisions applied and the digest after them
        self._ready: Future[None] = promise()
        self._ended: Future[None] = promise()
        self._thread = threading.Thread(target=self._run, name=f"engine-loop-{rank}", daemon=True)

    # For the caller's threads.

    def start(self) -> Future[None]:
        """Start the thread. The future resolves when the engine is built, or carries what went wrong."""
        self._thread.start()
        return self._ready

    def submit(self, requests: Sequence[GenerationRequest]) -> list[RequestError | None]:
        """Validate requests here and queue the good ones; their completions come through `on_completions`.

        Before the first verified pull they wait. What is refused disturbs nobody else.

        Returns:
            One entry per request: None when it was queued.

        Raises:
            GeneratorNotServing: asleep, stale or not built yet; none was queued.
            GeneratorFailed: crashed or closed, with the cause.
        """
        answers: list[RequestError | None] = []
        with self._changed:
            engine = self._leading_engine()
        for request in requests:
            try:
                engine.validate(request)
                answers.append(None)
            except RequestError as error:
                answers.append(error)
            except Exception as error:  # a temperature that is a string, for one: only this request fails
                reason = f"request {request.request_id!r}: {type(error).__name__}: {error}"
                answers.append(RequestError(reason))
        now = self._clock()
        with self._changed:
            self._leading_engine()
            for index, request in enumerate(requests):
                if answers[index] is None:
                    try:
                        self._inbox.submit(request)
                        self._submitted_at[request.request_id] = now
                    except RequestError as error:
                        answers[index] = error
            self._changed.notify()
        return answers

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; each live one completes with the tokens so far. Other ids are ignored.

        Raises:
            GeneratorFailed: crashed or closed, with the cause.
        """
        with self._changed:
            self._leading_engine()
            dropped = [self._inbox.abort(request_id) for request_id in request_ids]
            completions = [self._unstarted(request) for request in dropped if request is not None]
            self._changed.notify()
        if completions:
            self._on_completions(completions)

    def pull(self, publication: Publication) -> Future[PullReport]:
        """Load, verify and serve a publication between two decisions; requests in flight go on under it.

        Of several pulls that wait only the newest is loaded, and all their futures resolve with it. The future
        fails with WeightsError when the pull does: then requests in flight come back aborted with their tokens so
        far, and requests are refused until a pull succeeds.

        Raises:
            WeightsError: older than what was served here before.
            GeneratorNotServing: asleep.
            GeneratorFailed: crashed or closed, with the cause.
        """
        with self._changed:
            self._leading_engine()
            self._inbox.pull(publication)
            return self._await_pull(publication)

    def sleep(self) -> Future[int]:
        """Stop serving and give up memory. Everything in flight comes back aborted with its tokens so far.

        Returns:
            The bytes that were really freed (0 where the engine can free nothing).

        Raises:
            GeneratorNotServing: a wake-up is under way.
            GeneratorFailed: crashed or closed, with the cause.
        """
        with self._changed:
            self._leading_engine()
            self._inbox.sleep()
            future: Future[int] = promise()
            self._sleep_callers.append(future)
            self._changed.notify()
            return future

    def wake_up(self, publication: Publication) -> Future[PullReport]:
        """Take the memory back and serve a publication, through the same checks as `pull`."""
        with self._changed:
            self._leading_engine()
            self._inbox.wake(publication)
            return self._await_pull(publication)

    def close(self) -> Future[None]:
        """End the loop on all ranks and give the engine up; whatever is in flight comes back aborted.

        On other ranks than 0 this only returns the future: they end with rank 0. After a crash the future carries
        the cause.
        """
        with self._changed:
            if self._rank == 0:
                self._inbox.close()
                self._changed.notify()
            return self._ended

    def status(self) -> LoopStatus:
        """The loop as it is after the last applied decision; never fails and never waits for a step."""
        with self._changed:
            inbox, engine = self._inbox, self._engine
            decisions, digest = self._progress
            return LoopStatus(
                rank=self._rank,
                state=inbox.state,
                reason=inbox.reason,
                version=inbox.version,
                running=0 if engine is None else len(engine.running()),
                waiting=inbox.waiting,
                decisions=decisions,
                digest=f"{digest:016x}",
                failure="" if self._failure is None else str(self._failure),
                engine={} if engine is None else engine.stats(),
            )

    # In the engine thread.

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            self._channel.open()
        except BaseException as error:
            self._die(error)
            self._ready.set_exception(error)
            return
        lockstep = Lockstep(
            engine,
            rank=self._rank,
            channel=self._channel,
            load_publication=self._load_publication,
            verify=self._verify,
            keep_cache=self._keep_cache,
            clock=self._clock,
        )
        with self._changed:
            self._engine = engine
            self._progress = (lockstep.decisions, lockstep.digest)
        self._ready.set_result(None)
        try:
            if self._rank == 0:
                self._lead(engine, lockstep)
            else:
                self._follow(lockstep)
            self._channel.close()
            engine.close()
        except BaseException as error:
            self._die(error)
            self._on_fatal(error)
            return
        self._ended.set_result(None)

    def _lead(self, engine: Engine, lockstep: Lockstep) -> None:
        action = None
        while action is not LoopAction.CLOSE:
            decision = self._next_decision(engine, lockstep.digest)
            action = decision.action
            self._channel.send(decision)
            decided_at = self._clock()
            outcome = lockstep.apply(decision)
            self._progress = (lockstep.decisions, lockstep.digest)
            self._settle(decision, outcome, decided_at)

    def _follow(self, lockstep: Lockstep) -> None:
        action = None
        while action is not LoopAction.CLOSE:
            decision = self._channel.receive()
            action = decision.action
            outcome = lockstep.apply(decision)
            self._progress = (lockstep.decisions, lockstep.digest)
            with self._changed:
                self._note(outcome.pull)
                if action is LoopAction.SLEEP:
                    self._inbox.slept()
                elif action is LoopAction.CLOSE:
                    self._inbox.closed()

    def _next_decision(self, engine: Engine, digest: int) -> LoopDecision:
        """Wait for something to do, for a heartbeat at most, and take it out of the inbox with those who asked."""
        with self._changed:
            has_work = engine.has_work()
            self._changed.wait_for(
                lambda: self._inbox.next_action(has_work) is not LoopAction.IDLE, timeout=self._heartbeat_seconds
            )
            decision = self._inbox.decide(has_work, digest)
            match decision.action:
                case LoopAction.STEP:
                    now = self._clock()
                    for request in decision.admit:
                        self._queued_for[request.request_id] = now - self._submitted_at.pop(request.request_id)
                case LoopAction.PULL_MODEL_STATE_DICT | LoopAction.WAKE:
                    self._callers, self._pull_callers = Callers(pull=self._pull_callers), []
                case LoopAction.SLEEP | LoopAction.CLOSE:
                    self._callers = Callers(pull=self._pull_callers, sleep=self._sleep_callers)
                    self._pull_callers, self._sleep_callers = [], []
                case LoopAction.IDLE:
                    pass
            return decision

    def _settle(self, decision: LoopDecision, outcome: Outcome, decided_at: float) -> None:
        """Tell everybody what came of a decision."""
        completions = outcome.completions
        with self._changed:
            callers, self._callers = self._callers, Callers()
            if outcome.pull is not None and outcome.pull.error is None:
                served = outcome.pull.publication.version  # asked for while a newer one was pulled: superseded too
                callers.pull += [caller for caller in self._pull_callers if caller.version < served]
                self._pull_callers = [caller for caller in self._pull_callers if caller.version >= served]
            self._note(outcome.pull)
            for completion in completions:
                self._inbox.finished(completion.request_id)
                completion.metrics["seconds_queued"] = self._queued_for.pop(completion.request_id)
            if self._inbox.state is not ServingState.SERVING and decision.action is not LoopAction.IDLE:
                completions += [self._unstarted(request) for request in self._inbox.interrupt()]
        if outcome.pieces:
            self._on_pieces(outcome.pieces)
        if completions:
            self._on_completions(completions)
        closed = GeneratorFailed("the generator was closed") if decision.action is LoopAction.CLOSE else None
        for sleeper in callers.sleep:
            if closed is not None:
                sleeper.set_exception(closed)
            else:
                sleeper.set_result(outcome.freed_bytes)
        for caller in callers.pull:
            if outcome.pull is None:
                caller.future.set_exception(closed or GeneratorNotServing("asleep"))
            else:
                caller.tell(outcome.pull, decided_at)

    def _note(self, pull: PullOutcome | None) -> None:
        """Bring the serving state up to date after a pull, on any rank."""
        if pull is not None and pull.error is not None:
            self._inbox.failed(str(pull.error))
        elif pull is not None:
            self._inbox.verified(pull.publication.version)

    def _die(self, error: BaseException) -> None:
        """Fail everything that is outstanding; later calls fail by themselves."""
        with self._changed:
            self._failure = error
            pulls = self._callers.pull + self._pull_callers
            sleeps = self._callers.sleep + self._sleep_callers
        futures: list[Future[Any]] = [*(caller.future for caller in pulls), *sleeps, self._ended]
        for future in futures:
            if not future.done():
                future.set_exception(self._failed())

    # Under the lock.

    def _failed(self) -> GeneratorFailed:
        error = GeneratorFailed(
            f"the engine loop of rank {self._rank} died: {type(self._failure).__name__}: {self._failure}"
        )
        error.__cause__ = self._failure
        return error

    def _leading_engine(self) -> Engine:
        if self._failure is not None:
            raise self._failed()
        if self._rank > 0:
            raise GeneratorFailed(f"rank {self._rank} follows: only rank 0 of a generator takes calls")
        if self._engine is None:
            raise GeneratorNotServing("the engine is not built yet")
        return self._engine

    def _await_pull(self, publication: Publication) -> Future[PullReport]:
        caller = PullCaller(version=publication.version, asked_at=self._clock())
        self._pull_callers.append(caller)
        self._changed.notify()
        return caller.future

    def _unstarted(self, request: GenerationRequest) -> Completion:
        """An aborted completion of a request that no engine has seen."""
        return Completion(
            request_id=request.request_id,
            token_ids=np.zeros(0, dtype=np.int32),
            logprobs=np.zeros(0, dtype=np.float32),
            versions=np.zeros(0, dtype=np.int64),
            finish_reason=FinishReason.ABORT,
            metrics={"seconds_queued": self._clock() - self._submitted_at.pop(request.request_id)},
        )
