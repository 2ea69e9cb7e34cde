"""Samples a call's completions with the engines and turns them into choices for its client.

- Every request has an id of its own, and is sent once.
- Nothing bounds the time of an answer but its tokens. A dead fleet fails its requests, and a client may hang up.
- What tokenizes is done one after the other: what may take long in a thread, because it must not hold up the answers of
  other calls, and the rest on the loop, because a thread costs more than a token.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from titan_rl.errors import GeneratorFailed, TitanError
from titan_rl.gateway.callers import Caller
from titan_rl.gateway.calls import ApiError, Chat, CompletionCall, Delta, Fleet, ServedPolicy, api_error
from titan_rl.gateway.choices import PARSE_EACH, ChoiceReader
from titan_rl.routing.health import GeneratorStatus
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece

T = TypeVar("T")

QUICK_TEXT = 2 << 10
"""Characters and tokens that are read within two milliseconds."""
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Sampler:
    """Turns calls into choices. Belongs to one event loop."""

    def __init__(self, fleet: Fleet, policy: ServedPolicy, metrics: GatewayMetrics, *, max_choices: int) -> None:
        self.policy = policy
        self._fleet = fleet
        self._metrics = metrics
        self._max_choices = max_choices
        self._jobs = RenderJobs()

    async def count_tokens(self, chat: Chat, caller: Caller, *, model: str) -> int:
        """Of the prompt that a chat would be. Raises as `whole`."""
        self.policy.check_name(model)
        CompletionCall(id="", prompts=[chat]).check_length(self.policy)
        return len((await self._jobs.run(functools.partial(caller.prompt, chat))).token_ids)

    async def whole(self, call: CompletionCall, caller: Caller) -> list[Delta]:
        """Every choice, in one delta, once all are sampled. Raises ApiError, TitanError: it is refused, or failed."""
        async with self._sampled(call, caller, stream=False) as (readers, sampled):
            completions = {index: each async for index, each in sampled if isinstance(each, Completion)}
            ends = [completions[index] for index in range(len(readers))]
            deltas = await self._jobs.run(lambda: [*map(ChoiceReader.finish, readers, ends)])
            for delta in deltas:
                self._answered(delta, call, caller)
        return deltas

    async def stream(self, call: CompletionCall, caller: Caller) -> AsyncGenerator[Delta, None]:
        """Every delta, as tokens come; a choice whose stop text was found is not sampled any further. As `whole`."""
        async with self._sampled(call, caller, stream=True) as (readers, sampled):
            async for index, what in sampled:
                read = functools.partial(readers[index].read_next, what)
                short = isinstance(what, Piece) and what.end <= PARSE_EACH and what.prompt_logprobs is None
                delta = await self._jobs.run(read, quick=short)
                if delta is None:
                    continue
                if delta.choice is not None:
                    await sampled.end(index)
                    self._answered(delta, call, caller)
                yield delta

    @asynccontextmanager
    async def _sampled(
        self, call: CompletionCall, caller: Caller, *, stream: bool
    ) -> AsyncIterator[tuple[list[ChoiceReader], SampleStream]]:
        """A reader per choice, and the stream of sampled tokens. The caller hears of failures inside the block."""
        requests: list[GenerationRequest] = []
        try:
            if len(call.prompts) * call.choices > self._max_choices:
                problem = f"{len(call.prompts)} prompts × {call.choices} choices are more than {self._max_choices}"
                raise ApiError(400, problem, code="invalid_request")
            quick = call.check_length(self.policy) <= QUICK_TEXT and call.answer is None
            asked = await self._jobs.run(functools.partial(caller.asked, call), quick=quick)
            requests = caller.requests(call, asked)
            for option in caller.ignored_options(call):
                self._metrics.ignored_options.labels(option).inc()
            readers = [ChoiceReader(index, each, call, self.policy.renderer) for index, each in enumerate(requests)]
            async with aclosing(SampleStream(self._fleet, requests, stream=stream, ended=caller.ended)) as sampled:
                yield readers, sampled
        except Exception as error:
            caller.on_failure(error)
            if (shown := api_error(error)).status == 400:
                raise call.refused(shown) from error
            raise
        finally:
            caller.on_end(requests)

    def _answered(self, last: Delta, call: CompletionCall, caller: Caller) -> None:
        assert last.choice is not None
        caller.on_answer(last.choice)
        prompt, completion = len(last.prompt) * (last.index % call.choices == 0), len(last.choice.completion.token_ids)
        call.usage.update(prompt_tokens=prompt, completion_tokens=completion)
        self._metrics.prompt_tokens.inc(prompt)
        self._metrics.completion_tokens.inc(completion)


class SampleStream:
    """Iterates over the pieces and completions of several requests as they come, each with the request's position. A
    request's completion is its last item. The first failure ends the iteration; `aclose` aborts the open requests.

    At most one item waits per request: pieces that a slow reader has not taken are joined, and the completion replaces
    them. So a reader is never further behind than the tokens sampled while it was busy.
    """

    def __init__(
        self, fleet: Fleet, requests: Sequence[GenerationRequest], *, stream: bool, ended: asyncio.Future[TitanError]
    ) -> None:
        """`stream`: pieces come too. The result of `ended` fails the iteration."""
        self._waiting: dict[int, Piece | Completion] = {}
        self._changed = asyncio.Event()
        samples = (self._sample(fleet, index, request, stream=stream) for index, request in enumerate(requests))
        self._tasks = [*map(asyncio.ensure_future, samples)]
        self._all, self._ended = asyncio.gather(*self._tasks), ended
        for end in (self._all, ended):
            end.add_done_callback(self._wake)

    def __aiter__(self) -> SampleStream:
        return self

    async def __anext__(self) -> tuple[int, Piece | Completion]:
        """Raises TitanError: as `Fleet.stream`, and for a completion that somebody else aborted."""
        while not self._ended.done():
            if self._waiting:
                index = next(iter(self._waiting))
                return index, self._waiting.pop(index)
            if self._all.done():
                self._all.result()
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        raise self._ended.result()

    async def end(self, index: int) -> None:
        """Nothing more is wanted of this request."""
        await _cancel([self._tasks[index]])
        self._waiting.pop(index, None)  # pieces came until it was over

    async def aclose(self) -> None:
        self._ended.remove_done_callback(self._wake)
        await _cancel(self._tasks)

    async def _sample(self, fleet: Fleet, index: int, request: GenerationRequest, *, stream: bool) -> None:
        add = functools.partial(self._add, index)
        with suppress(asyncio.CancelledError):  # nothing more is wanted of it: the others go on
            add(await (fleet.stream(request, add) if stream else fleet.generate(request)))

    def _add(self, index: int, what: Piece | Completion) -> None:
        if isinstance(what, Completion) and what.finish_reason is FinishReason.ABORT:
            tokens = len(what.token_ids)
            raise GeneratorFailed(f"the completion was aborted after {tokens} tokens: the fleet is being stopped")
        before = self._waiting.get(index)
        if isinstance(before, Piece) and isinstance(what, Piece):
            what = Piece.join([before, what])
        self._waiting[index] = what
        self._changed.set()

    def _wake(self, end: asyncio.Future[Any]) -> None:
        end.cancelled() or end.exception()  # heard, should nobody iterate any more
        self._changed.set()


async def _cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    running = [task for task in tasks if task.cancel()]
    await asyncio.gather(*running, return_exceptions=True)


class RenderJobs:
    """One at a time: renderers are not made for several threads."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self._renders = threading.Lock()

    async def run(self, job: Callable[[], T], *, quick: bool = False) -> T:
        """What `job` returns or raises. In the thread the jobs have their turns, and a job whose caller is cancelled
        before its turn does not run. `quick`: it may run at once and on the loop, if the thread does nothing."""
        if quick and self._renders.acquire(blocking=False):
            return self._run(job, waits=False)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, job)

    def _run(self, job: Callable[[], T], waits: bool = True) -> T:
        if waits:
            self._renders.acquire()
        try:
            return job()
        except Exception:
            raise
        except BaseException as error:  # a tokenizer's panic, for one, which would end the gateway
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self._renders.release()


class GatewayMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ours: dict[str, Any] = {"namespace": "titan_rl_gateway", "registry": self._registry}
        self.calls = Counter("calls", "HTTP calls by path and status.", ["path", "status"], **ours)
        self.open = Gauge("open_calls", "HTTP calls without a finished answer.", **ours)
        about = "From a call's headers to its answer's end."
        self.seconds = Histogram("call_seconds", about, ["path"], buckets=SECONDS_BUCKETS, **ours)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts that were answered.", **ours)
        self.completion_tokens = Counter("completion_tokens", "Sampled tokens that were handed out.", **ours)
        about = "Sampling options of a rollout's program that were not used: the run decides how the policy samples."
        self.ignored_options = Counter("ignored_options", about, ["option"], **ours)
        self._in_flight = Gauge("generator_in_flight", "Requests that a generator runs.", ["generator"], **ours)
        self._served = Gauge("generator_served", "Completions that a generator finished.", ["generator"], **ours)
        self._failed = Gauge("generator_failed", "Attempts on a generator that failed.", ["generator"], **ours)
        self._state = Gauge("generator_state", "1 for the state that it is in.", ["generator", "state"], **ours)

    def exposition(self, fleet: Sequence[GeneratorStatus]) -> bytes:
        """Everything, with the fleet as it is now."""
        self._state.clear()
        for member in fleet:
            self._in_flight.labels(member.name).set(member.in_flight)
            self._served.labels(member.name).set(member.served)
            self._failed.labels(member.name).set(member.failed)
            self._state.labels(member.name, member.state).set(1)
        return generate_latest(self._registry)
