"""Part (c): how well each strategy spreads a long-tailed load of conversations over generators of equal speed.

A simulated clock drives the very classes of the router: `Dispatcher`, the strategies and `Fleet`; there are no
actors and nothing waits. A simulated generator runs so many requests at once, the others queue in order of arrival.
A request takes the time to read what is not in the generator's cache plus the time to write its answer; a session's
history is in the cache of the generator that served its last turn, and of no other.

The lower bound is total work ÷ generators: every turn on its session's generator, no slot ever free. Conversations
are long-tailed (log-normal answers), so nobody reaches it: the last sessions run on alone.

Part (d): what sticky sessions are worth to the prefix cache, with two real vLLM generators.

Conversations of several turns: each turn's prompt is the one before, what was sampled, and a new question, so all but
the question can be in the cache of the generator that served the last turn. Two routers in front of the same two
generators, one sticky, one round robin, work off the same conversations in turns; their prompts differ by contender
and round, so that no cache helps anybody but its own. Prompts are long and answers short: prefill is most of the work,
as it is for agents that read tool results.

The hit rate is vLLM's own count, as completions report it: prompt tokens whose KV was in the cache ÷ prompt tokens.
`most` is what it would be if everything but the questions were there (whole blocks are kept, so a little less can
be). With two generators round robin has hits too: whoever served the turn before the last one has most of the history.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from parts.fleet import POLICY, fleet

from titan_rl.actors.router_client import RouterClient
from titan_rl.generation.config import GeneratorConfig
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Assignment, Dispatcher
from titan_rl.routing.fleet import Fleet
from titan_rl.routing.generator import GeneratorState
from titan_rl.routing.strategies import build_strategy
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion, SamplingParams

STRATEGIES = ("round_robin", "least_loaded", "sticky_session")
GENERATORS = 8
SLOTS = 32
"""Requests that one generator runs at once."""
SESSIONS = 2000
LIVE_SESSIONS = 2 * GENERATORS * SLOTS
"""Under way at once; the next begins where one ends."""
WRITE_SECONDS = 1 / 50
"""Per sampled token, in each slot."""
READ_SECONDS = WRITE_SECONDS / 20
"""Per prompt token that is not in the cache."""
MOST_TURNS = 8
MEDIAN_ANSWER, SPREAD = 100, 1.0
"""Of the log-normal answers, in tokens, and the standard deviation of the logarithm."""
MOST_TOKENS = 2048
"""Asked for by every request: the router does not know how long an answer will be."""
QUESTION = 64
"""Tokens that each turn puts in front of the policy."""
THINKING_SECONDS = 0.5
"""Mean time between an answer and the session's next turn (exponential)."""


class Session(NamedTuple):
    answers: tuple[int, ...]  # tokens of each turn's answer
    pauses: tuple[float, ...]  # seconds before each turn but the first


def make_sessions(seed: int) -> list[Session]:
    random = np.random.default_rng(seed)
    sessions = []
    for _ in range(SESSIONS):
        turns = int(random.integers(2, MOST_TURNS, endpoint=True))
        answers = np.clip(random.lognormal(np.log(MEDIAN_ANSWER), SPREAD, turns), 1, MOST_TOKENS).astype(int)
        pauses = random.exponential(THINKING_SECONDS, turns - 1)
        sessions.append(Session(tuple(answers.tolist()), tuple(pauses.tolist())))
    return sessions


def lower_bound(sessions: Sequence[Session]) -> float:
    """Seconds: the work that has to be done, each token read and written once, over all slots."""
    read = sum(len(session.answers) * QUESTION for session in sessions)
    written = sum(sum(session.answers) for session in sessions)
    return (read * READ_SECONDS + written * WRITE_SECONDS) / (GENERATORS * SLOTS)


@dataclass(slots=True)
class _Talk:
    """A session under way."""

    session: Session
    turn: int = 0
    history: int = 0  # tokens so far
    home: str = ""  # generator of its last turn

    def request(self, name: str) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"{name}/{self.turn}",
            prompt_token_ids=np.broadcast_to(np.int32(0), self.history + QUESTION),
            sampling=SamplingParams(max_new_tokens=MOST_TOKENS),
            seed=0,
            session_id=name,
        )


class _Fleet:
    """Simulated generators."""

    def __init__(self, names: Sequence[str]) -> None:
        self.free = dict.fromkeys(names, SLOTS)
        self.queue: dict[str, deque[str]] = {name: deque() for name in names}


class Outcome(NamedTuple):
    makespan: float  # seconds
    hit_share: float  # of the turns after the first: served by the generator of the turn before
    longest_queue: int


@dataclass(slots=True)
class Simulation:
    """One strategy on one set of sessions."""

    strategy: str
    sessions: Sequence[Session]
    _events: list[tuple[float, int, str, str]] = field(default_factory=list)  # time, order, what, session
    _order: Any = field(default_factory=itertools.count)

    def run(self) -> Outcome:
        strategy = build_strategy(RouterConfig(strategy=self.strategy))
        dispatcher, health = Dispatcher(strategy), Fleet(strategy)
        names = [f"generator{index}" for index in range(GENERATORS)]
        for name in names:
            health.joined(name)
            health.move(name, GeneratorState.SYNCING)
            health.move(name, GeneratorState.SERVING, version=PolicyVersion(0, 0))
        fleet = _Fleet(names)
        waiting = iter(enumerate(self.sessions))
        talks: dict[str, _Talk] = {}
        on: dict[str, str] = {}  # session → generator of its turn
        hits = later_turns = longest = 0
        now = 0.0

        def begin() -> None:
            """Start the next session, if there is one."""
            for index, session in itertools.islice(waiting, 1):
                talks[f"s{index}"] = _Talk(session)
                self._at(now, "ask", f"s{index}")

        def start(name: str, session: str) -> None:
            talk = talks[session]
            cached = talk.history if talk.home == name else 0
            seconds = (talk.history - cached + QUESTION) * READ_SECONDS + talk.session.answers[
                talk.turn
            ] * WRITE_SECONDS
            fleet.free[name] -= 1
            self._at(now + seconds, "answer", session)

        def place(assignment: Assignment) -> None:
            nonlocal hits, later_turns, longest
            name, session = assignment.generator, assignment.request.session_id
            assert session is not None
            on[session] = name
            if talks[session].turn:
                later_turns += 1
                hits += talks[session].home == name
            if fleet.free[name]:
                start(name, session)
            else:
                fleet.queue[name].append(session)
                longest = max(longest, len(fleet.queue[name]))

        for _ in range(LIVE_SESSIONS):
            begin()
        while self._events:
            now, _, what, session = heapq.heappop(self._events)
            talk = talks[session]
            if what == "ask":
                for assignment in dispatcher.submit([talk.request(session)], now):
                    place(assignment)
                continue
            name = on.pop(session)
            dispatcher.completed(f"{session}/{talk.turn}", _answer(f"{session}/{talk.turn}"), now)
            fleet.free[name] += 1
            if fleet.queue[name]:
                start(name, fleet.queue[name].popleft())
            talk.home = name
            talk.history += QUESTION + talk.session.answers[talk.turn]
            talk.turn += 1
            if talk.turn < len(talk.session.answers):
                self._at(now + talk.session.pauses[talk.turn - 1], "ask", session)
            else:
                strategy.end_session(session)
                del talks[session]
                begin()
        if dispatcher.live or dispatcher.waiting or any(dispatcher.load(name) for name in names):
            raise RuntimeError(f"{self.strategy}: the dispatcher still holds requests after the last answer")
        return Outcome(now, hits / later_turns, longest)

    def _at(self, time: float, what: str, session: str) -> None:
        heapq.heappush(self._events, (time, next(self._order), what, session))


def _answer(request_id: str) -> Completion:
    """Bookkeeping does not look into the tokens of an answer."""
    none = np.zeros(0, np.int32)
    return Completion(
        request_id=request_id, token_ids=none, logprobs=none, versions=none, finish_reason=FinishReason.STOP
    )


def measure_strategies(seeds: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows for people (strategy, makespan ÷ lower bound, hits, longest queue) and figures; medians over seeds."""
    outcomes: dict[str, list[tuple[float, Outcome]]] = {name: [] for name in STRATEGIES}
    for seed in range(seeds):
        sessions = make_sessions(seed)
        bound = lower_bound(sessions)
        for name in STRATEGIES:
            outcome = Simulation(name, sessions).run()
            outcomes[name].append((outcome.makespan / bound, outcome))
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {"strategy_seeds": seeds}
    for name, results in outcomes.items():
        ratio = statistics.median(ratio for ratio, _ in results)
        hits = statistics.median(outcome.hit_share for _, outcome in results)
        queue = max(outcome.longest_queue for _, outcome in results)
        figures |= {f"makespan_ratio_{name}": round(ratio, 3), f"sticky_hit_share_{name}": round(hits, 3)}
        rows.append([name, f"{ratio:.3f}", f"{hits:.3f}", queue])
    return rows, figures


CONVERSATIONS, TURNS = 24, 6
QUESTION_TOKENS = 128
ANSWER_TOKENS = (16, 48)
"""Least and most; different lengths keep the sessions from moving in step, in which round robin would be sticky."""
LENGTH = 2048

CACHED_STRATEGIES = {"sticky_session": 0, "round_robin": 1}
"""And the part of the prompts' seed that is a strategy's own."""


class Run(NamedTuple):
    """One strategy's work on one set of conversations."""

    hit_rate: float
    most: float
    tokens_per_second: float  # sampled
    seconds: float


async def converse(router: RouterClient, strategy: str, number: int, session: int) -> list[Completion]:
    random = np.random.default_rng((CACHED_STRATEGIES[strategy], number, session))
    lengths = np.random.default_rng((number, session)).integers(*ANSWER_TOKENS, TURNS, endpoint=True)  # alike for all
    session_id = f"{strategy}-{number}-{session}"
    history = np.zeros(0, np.int32)
    completions = []
    for turn, length in enumerate(lengths.tolist()):
        question = random.integers(2, 13, QUESTION_TOKENS).astype(np.int32)
        request = GenerationRequest(
            request_id=f"{session_id}-{turn}",
            prompt_token_ids=np.concatenate([history, question]),
            sampling=SamplingParams(max_new_tokens=length),
            seed=int(random.integers(2**62)),
            session_id=session_id,
        )
        completion = await router.generate(request)
        history = np.concatenate([request.prompt_token_ids, completion.token_ids])
        completions.append(completion)
    return completions


async def work(router: RouterClient, strategy: str, number: int) -> Run:
    started = time.perf_counter()
    sessions = await asyncio.gather(*(converse(router, strategy, number, index) for index in range(CONVERSATIONS)))
    seconds = time.perf_counter() - started
    router.end_sessions([f"{strategy}-{number}-{index}" for index in range(CONVERSATIONS)])
    completions = list(itertools.chain(*sessions))
    cached, read = (sum(each.metrics[name] for each in completions) for name in ("cached_tokens", "prompt_tokens"))
    most = 1 - len(completions) * QUESTION_TOKENS / read
    return Run(cached / read, most, sum(len(each.token_ids) for each in completions) / seconds, seconds)


async def measure_prefix_cache(rounds: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows for people (strategy, hit rate, tokens/s, seconds) and figures."""
    config = GeneratorConfig(
        count=2, max_model_len=LENGTH, max_num_batched_tokens=2 * LENGTH, max_num_seqs=CONVERSATIONS, block_size=32
    )
    runs: dict[str, list[Run]] = {strategy: [] for strategy in CACHED_STRATEGIES}
    async with fleet(config, replace(POLICY, max_length=LENGTH)) as up:
        routers = {strategy: up.router(strategy, RouterConfig(strategy=strategy)) for strategy in CACHED_STRATEGIES}
        publication = up.checkpoint.publish()
        for router in routers.values():
            await router.pull_model_state_dict(publication)
        for number in range(rounds + 1):  # the first round warms everything up
            for strategy in list(CACHED_STRATEGIES)[:: 1 if number % 2 else -1]:
                run = await work(routers[strategy], strategy, number)
                if number:
                    runs[strategy].append(run)
            print(f"(d) round {number} of {rounds} done", flush=True)

    def median(strategy: str, what: str) -> float:
        return statistics.median(getattr(run, what) for run in runs[strategy])

    pairs = zip(runs["sticky_session"], runs["round_robin"], strict=True)
    worth = statistics.median(sticky.tokens_per_second / other.tokens_per_second for sticky, other in pairs)
    most = median("sticky_session", "most")
    figures: dict[str, Any] = {"prefix_cache_rounds": rounds, "prefix_cache_hit_rate_most": round(most, 3)}
    for strategy in CACHED_STRATEGIES:
        figures |= {
            f"prefix_cache_hit_rate_{strategy}": round(median(strategy, "hit_rate"), 3),
            f"prefix_cache_tokens_per_second_{strategy}": round(median(strategy, "tokens_per_second")),
        }
    figures["prefix_cache_sticky_to_round_robin"] = round(worth, 3)
    rows: list[list[Any]] = [
        [
            strategy,
            f"{median(strategy, 'hit_rate'):.3f}",
            f"{median(strategy, 'tokens_per_second'):,.0f}",
            f"{median(strategy, 'seconds'):.1f}",
            f"{worth:.2f}" if strategy == "sticky_session" else "1",
        ]
        for strategy in CACHED_STRATEGIES
    ]
    return rows, figures
