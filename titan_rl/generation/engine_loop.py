"""The loop that drives one rank's engine, in one thread of its own.

Consumes: requests, aborts, pulls, sleep, wake-up and close, from any thread (rank 0); decisions of rank 0 (others).
Waits for: work, on rank 0 for at most a heartbeat; the next decision, on the others.
Is woken by: every call that puts something into the inbox.
Produces: completions through `on_completions`, pieces of those that stream through `on_pieces`, reports through futures
(rank 0 only).
On failure: all outstanding and later calls fail at once with the cause, and `on_fatal` is called.

Only this thread builds, steps, loads and closes the engine and runs collectives, so a step never blocks the callers'
threads. A request id that `submit` accepted comes back exactly once: as a completion, or through `on_fatal`. Pieces of
a request come before its completion and in order, and no token comes in two pieces.
"""

import datetime
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.errors import GeneratorFailed, GeneratorNotServing, RequestError
from titan_rl.generation.config import ENGINES, GeneratorConfig
from titan_rl.generation.decisions import DecisionMaker, LoopAction, LoopDecision
from titan_rl.generation.engine import Engine
from titan_rl.generation.lockstep import Lockstep, Outcome
from titan_rl.importing import import_name
from titan_rl.metrics.timeline import timeline
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece, PolicyVersion, sampled_arrays
from titan_rl.weights.manifest import Publication

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
"""Followers wait in one collective for as long as rank 0 takes for a decision (a burst of steps, a pull) or, when idle,
for a heartbeat. A dead rank is noticed at once."""

FIRST_STEP_SECONDS = 600.0
"""On CUDA the first step may compile kernels: for so long it counts as progress."""

HANDOVER_SECONDS = 0.0005
"""The engine thread sleeps so long when it has passed on first tokens. Otherwise the thread that sends them would wait
for Python's lock through most of the next step."""


class _Call(NamedTuple):
    """A pull, wake-up or sleep that waits for its outcome. The engine thread resolves the future exactly once."""

    sleeps: bool
    future: Future[Any]


def make_lockstep(config: GeneratorConfig, rank: int, model_path: Path, device: str) -> Lockstep:
    """In the engine thread of a process whose environment is that of `join_world`."""
    # Imported here: the controller imports this module and has no use for torch.
    import torch.distributed as dist

    from titan_rl.weights.puller import SharedMemoryReader, verify
    from titan_rl.weights.ranks import Ranks

    engine: Engine = import_name(config.engine, ENGINES)(config, model_path, device)
    # It ends with the process groups that the engine has made: to destroy it earlier breaks the engine's own exit.
    group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if config.tensor_parallel > 1 else None
    return Lockstep(
        engine,
        rank=rank,
        ranks=Ranks(group),
        load_publication=SharedMemoryReader(model_path, device).served,
        verify=lambda publication, engine: verify(publication, engine.served_shards(), group),
        keep_cache=config.keep_prefix_cache,
    )


class EngineLoop:
    """One rank's engine thread.

    Args:
        make_lockstep: called in the engine thread; builds the engine and the `Lockstep` around it.
        on_completions: called on rank 0 with finished and aborted requests, in the engine thread (for a request that
            never reached the engine: in the thread that calls `abort`). Must be quick and must not raise.
        on_pieces: called like `on_completions`, once per decision, with pieces of streamed requests.
        on_fatal: called once, on any rank, if the loop dies after it had started. A follower's process must exit then,
            so that rank 0 notices before a collective times out.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        rank: int,
        model_path: Path,
        device: str,
        make_lockstep: Callable[[GeneratorConfig, int, Path, str], Lockstep] = make_lockstep,
        on_completions: Callable[[list[Completion]], object],
        on_pieces: Callable[[list[Piece]], object],
        on_fatal: Callable[[BaseException], object],
    ) -> None:
        self._make_lockstep = lambda: make_lockstep(config, rank, model_path, device)
        self._rank = rank
        self._heartbeat_seconds = config.heartbeat_seconds
        self._on_completions = on_completions
        self._on_pieces = on_pieces
        self._on_fatal = on_fatal
        self._changed = threading.Condition()  # guards everything below
        # alone, there is no broadcast to amortise
        self._inbox = DecisionMaker(burst_steps=config.burst_steps if config.tensor_parallel > 1 else 1)
        self._submitted_at: dict[str, float] = {}  # of live requests
        self._waiting: list[_Call] = []  # for a change that is not decided yet
        self._applying: list[_Call] = []  # for the decision that is being applied
        self._failure: GeneratorFailed | None = None
        self._engine: Engine | None = None
        self._progress = 0
        self._patience = FIRST_STEP_SECONDS if device == "cuda" else 0.0
        self._patient_until = math.inf  # building, pulling, sleeping or waking: whoever asked has a bound of its own
        self._ready: Future[None] = _promise()
        self._ended: Future[None] = _promise()
        self._thread = threading.Thread(target=self._run, name=f"engine-loop-{rank}", daemon=True)

    # For the caller's threads.

    def start(self) -> Future[None]:
        """Start the thread. The future resolves when the engine is built, or carries the error."""
        self._thread.start()
        return self._ready

    def submit(self, requests: Sequence[GenerationRequest]) -> list[RequestError | None]:
        """Queue the valid ones of these requests; returns for each None, or why it was not queued. Before the first
        verified pull they wait. Raises GeneratorNotServing: asleep, stale or not built yet; none was queued.
        GeneratorFailed: crashed or closed, with the cause."""
        answers: list[RequestError | None] = []
        with self._changed:
            engine = self._leading_engine()
        for request in requests:
            try:
                engine.validate(request)
                answers.append(None)
            except Exception as error:  # such as a temperature that is a string: only this request fails
                reason = f"request {request.request_id!r}: {type(error).__name__}: {error}"
                answers.append(error if isinstance(error, RequestError) else RequestError(reason))
        now = time.monotonic()
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
        """Abort requests; each live one completes with the tokens so far. Other ids are ignored. Raises
        GeneratorFailed if crashed or closed."""
        with self._changed:
            self._leading_engine()
            dropped = [self._inbox.abort(request_id) for request_id in request_ids]
            completions = [self._unstarted(request) for request in dropped if request is not None]
            self._changed.notify()
        if completions:
            self._on_completions(completions)

    def pull(self, publication: Publication) -> Future[PolicyVersion]:
        """Load, verify and serve a publication between two decisions; requests in flight go on under it.

        Of several pulls that wait only the last is loaded, and all their futures resolve with its version. The future
        fails with WeightsError when the pull does: then requests in flight come back aborted with their tokens so
        far, and requests are refused until a pull succeeds. Raises at once what `DecisionMaker.pull` raises; so do
        `sleep` and `wake_up`.
        """
        return self._ask(lambda: self._inbox.pull(publication))

    def sleep(self) -> Future[int]:
        """Stop serving and free memory; the future has the bytes that were freed (0 if the engine can free nothing).
        All requests in flight come back aborted with their tokens so far."""
        return self._ask(self._inbox.sleep, sleeps=True)

    def wake_up(self, publication: Publication) -> Future[PolicyVersion]:
        """Allocate the memory again and serve a publication, with the same checks as `pull`."""
        return self._ask(lambda: self._inbox.wake(publication))

    def close(self) -> Future[None]:
        """End the loop on all ranks and free the engine. Requests in flight come back aborted. On ranks other than 0
        this only returns the future: they end with rank 0. After a crash the future carries the cause."""
        with self._changed:
            if self._rank == 0:
                self._inbox.close()
                self._changed.notify()
            return self._ended

    def pulse(self) -> int:
        """A number that grows with every decision that is applied, idle heartbeats included. It stands still in a step
        that never ends. In a build, pull or sleep, which have bounds of their own, it grows by being asked, and for a
        while in the first step."""
        with self._changed:
            self._progress += time.monotonic() < self._patient_until
            return self._progress

    def _ask(self, change: Callable[[], None], *, sleeps: bool = False) -> Future[Any]:
        with self._changed:
            self._leading_engine()
            change()
            call = _Call(sleeps, _promise())
            self._waiting.append(call)
            self._changed.notify()
            return call.future

    # In the engine thread.

    def _run(self) -> None:
        timeline.doing("build")
        try:
            lockstep = self._make_lockstep()
            engine = lockstep.engine
        except BaseException as error:
            self._die(error)
            self._ready.set_exception(error)
            return
        with self._changed:
            self._engine, self._patient_until = engine, 0.0
        self._ready.set_result(None)
        try:
            self._drive(lockstep)
            timeline.doing("close")
            engine.close()
        except BaseException as error:
            self._die(error)
            self._on_fatal(error)
            return
        self._ended.set_result(None)

    def _drive(self, lockstep: Lockstep) -> None:
        action = None
        while action is not LoopAction.CLOSE:
            own = self._next_decision(lockstep) if self._rank == 0 else None
            if own is None:
                timeline.doing("wait", "rank 0")
            decision: LoopDecision = lockstep.ranks.broadcast(own)
            action = decision.action
            with self._changed:
                self._progress += 1
                has_bound = action not in (LoopAction.STEP, LoopAction.IDLE)
                self._patient_until = math.inf if has_bound else time.monotonic() + self._patience
            outcome = lockstep.apply(decision)
            if action is LoopAction.STEP:
                self._patience = 0.0
            if self._rank == 0:
                timeline.doing("settle")
                self._settle(decision, outcome)

    def _next_decision(self, lockstep: Lockstep) -> LoopDecision:
        """Wait for work, at most for a heartbeat, and take the next decision and its waiting futures."""
        with self._changed:
            has_work = lockstep.engine.has_work()
            if self._inbox.next_action(has_work) is LoopAction.IDLE:
                timeline.doing("wait", "weights" if self._inbox.version is None else "rollouts")
            self._changed.wait_for(
                lambda: self._inbox.next_action(has_work) is not LoopAction.IDLE, timeout=self._heartbeat_seconds
            )
            timeline.doing("settle")
            decision = self._inbox.decide(has_work, lockstep.digest)
            self._applying = []
            if decision.action not in (LoopAction.STEP, LoopAction.IDLE):
                self._applying, self._waiting = self._waiting, []
            return decision

    def _settle(self, decision: LoopDecision, outcome: Outcome) -> None:
        """Pass on the results of a decision: to the inbox, the callbacks and the waiting futures."""
        completions, error = outcome.completions, outcome.pull_error
        pulled = None if decision.publication is None else decision.publication.version
        with self._changed:
            if error is not None:
                self._inbox.failed(str(error))
            elif pulled is not None:
                self._inbox.verified(pulled)
            for completion in completions:
                self._inbox.finished(completion.request_id)
                seconds = time.monotonic() - self._submitted_at.pop(completion.request_id)
                in_engine = completion.metrics["generation/seconds_in_engine"]
                completion.metrics["generation/seconds_queued"] = max(0.0, seconds - in_engine)
            if self._inbox.version is None and decision.action is not LoopAction.IDLE:
                completions += [self._unstarted(request) for request in self._inbox.interrupt()]
        if outcome.pieces:
            self._on_pieces(outcome.pieces)
            if decision.admit:
                time.sleep(HANDOVER_SECONDS)
        if completions:
            self._on_completions(completions)
        for sleeps, future in self._applying:
            if decision.action is LoopAction.CLOSE:
                future.set_exception(GeneratorFailed("the generator was closed"))
            elif sleeps:
                future.set_result(outcome.freed_bytes)
            elif pulled is None:
                future.set_exception(GeneratorNotServing("asleep"))
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(pulled)

    def _die(self, error: BaseException) -> None:
        """Fail all outstanding calls. Later calls fail by themselves."""
        failure = GeneratorFailed(f"the engine loop of rank {self._rank} died: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._changed:
            self._failure = failure
        for future in [*(call.future for call in self._applying + self._waiting), self._ended]:
            if not future.done():
                future.set_exception(failure)

    # Under the lock.

    def _leading_engine(self) -> Engine:
        if self._failure is not None:
            raise self._failure
        if self._rank > 0:
            raise GeneratorFailed(f"rank {self._rank} follows: only rank 0 of a generator takes calls")
        if self._engine is None:
            raise GeneratorNotServing("the engine is not built yet")
        return self._engine

    def _unstarted(self, request: GenerationRequest) -> Completion:
        """An aborted completion of a request that no engine has seen."""
        return Completion(
            request_id=request.request_id,
            finish_reason=FinishReason.ABORT,
            metrics={"generation/seconds_queued": time.monotonic() - self._submitted_at.pop(request.request_id)},
            **sampled_arrays(),
        )


def _promise() -> Future[Any]:
    """A future that its holder cannot cancel, because the engine thread will resolve it in any case."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
