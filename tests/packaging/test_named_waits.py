"""Nothing waits for ever, and nothing waits by looking again and again; exceptions are named with their reasons.

A wait has no bound of its own if it waits for a future, an event, a queue or tasks, outside of `asyncio.timeout` and
without a `timeout`. Calls of coroutines end with what they await, and calls to actors with their connection
(`rpc/connection.py`). A poll is a sleep, or a wait with a time-out inside a loop. Read from the syntax trees.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "titan_rl"

ENDED_BY = {
    "playing/try_task.py:_line": "the next line that the person types, or the end of the input",
    "rollout/group_runner.py:play": "user code cleans up, which has a bound for each call",
    "rollout/rollouter.py:_call": "user code answers, which has a bound for each call",
    "rpc/connection.py:_connect": "Monarch ends the call with the process of the actor",
    "rpc/connection.py:_receive": "`_connect` cancels it, when the actor or its process is gone",
    "rpc/connection.py:gone": "`_connect` ends with the process; who asked cancels it",
    "rpc/connection.py:connect": "the client says when it disconnects; of one that died the task stays, idle",
    "rpc/mesh_client.py:retry_on_replacement": "whoever replaces the actors, or gives them up and ends the run",
    "actors/gateway.py:_of_session": "a call to the gateway: the idle time or the end of the rollout, or its process",
    "actors/generator.py:_outcome": "the engine loop answers, or fails the generator; a hang is found by its pulse",
    "actors/relay.py:_fetch": "the reads, which have a bound, and `Connection.gone`",
    "actors/relay.py:arrived": "the transfer of the chunk, whose calls have a bound; if it fails, so does this",
    "actors/relay.py:bring": "the transfer, whose calls have a bound, or the publication that takes its place",
    "actors/router.py:until": "every change of who serves; `_end` fails the router",
    "actors/weight_sync.py:_idle": "the generator's last answer; its death and the end of the router cancel it",
    "rpc/requests.py:client_lost": "the engine answers a request that is given up; a hang is found by its pulse",
    "actors/rollout_worker.py:run_group": "environments with time limits; its requests end with their tokens",
    "actors/rollouts.py:_alive": "a worker that is set up; whoever gives up the last one ends the caller",
    "actors/rollouts.py:run_group": "a call to a worker, which ends with its process; environments have time limits",
    "actors/router_client.py:_generate": "its last token; a lost router is replaced and asked again",
    "loop/versions.py:_push": "the trainer's call, which is bounded or waits for its replacement",
    "loop/checkpoints.py:written": "calls with a bound, then the disk; a stopped run waits SAVE_SECONDS",
    "loop/loop.py:_train": "the step, whose calls have a bound",
    "loop/changes.py:until": "every change of the ledger; the watchdog says who stands still",
    "loop/loop.py:run": "its tasks end, or one fails, which cancels this",
    "loop/loop.py:save": "the step, whose calls have a bound; a stopped run waits SAVE_SECONDS",
    "loop/recording.py:_write": "a call to the workers with a bound of its own",
    "loop/recording.py:settled": "a call to the workers with a bound of its own, then the disk",
    "loop/stages.py:warm_up": "a call to a worker, which ends with its process",
    "environments/rubric.py:awaited": "user code: the pool kills it after step_seconds or grade_seconds",
    "gateway/app.py:close": "the HTTP server ends its calls when the keys are ended; the caller has a bound",
    "gateway/app.py:ended": "stays open: `Supervisor` watches it for as long as the gateway lives",
    "gateway/callers.py:idle": "open calls end with their requests; the end of the rollout",
    "gateway/sampling.py:__anext__": "the requests, which end",
    "run/run.py:work": "a signal or a fault: `run_serving` watches for both",
    "supervision/run_end.py:unless_given_up": "the work, whose calls wait so long for a trainer that is replaced",
    "supervision/supervisor.py:until": "the end of a mesh or its start, which are bounded; `close` cancels who waits",
    "supervision/run_end.py:fail": "the first fatal fault; the end of the block cancels it",
    "supervision/run_end.py:watched": "the work of a replacement; `close` cancels it",
    "rollout/rollouter.py:idle": "`_session` cancels it",
    "rollout/rollouter.py:_session": "the program, its idle time, or its end",
    "rollout/group_runner.py:close": "the sessions, whose programs have been ended",
    "rollout/rollouter.py:run_program": "the session, which ends with its program",
    "isolation/fork_server_client.py:fork": "the host forks it, or is killed after KILL_SECONDS",
    "isolation/pool.py:run_program": "the host kills the process, or is killed after KILL_SECONDS",
    "isolation/pool.py:call": "an answer, the time limit, or the end of the process",
}
"""`file:function` → what ends the wait, also when its other side is gone."""

EXCEPTIONS = {
    "generation/engine_loop.py:_settle": "half a millisecond in which another thread sends first tokens",
    "run/training.py:_advise": "advice is no news that anything waits for",
    "metrics/activity.py:watch": "the watchdog: that nothing moves is no news either",
    "view/report.py:_act": "a run tells nobody that it has gone on",
    "view/watch.py:_looks": "a file tells nobody that it has grown",
    "supervision/supervisor.py:start": "the pause before a mesh that keeps failing is started again",
    "supervision/process_watch.py:_end_stages": "orphans tell nobody of their end but who reaps them; a second at most",
    "supervision/proxy.py:_connect": "a socket that is not there yet tells nobody that it is",
    "hosts/elastic.py:_rejoin": "the pause before a lost host is tried again",
    "rpc/mesh_client.py:until_still": "a process that hangs tells nobody, nor does a host that is cut off",
    "actors/rollout_worker.py:_report": "the kernel tells nobody that shared memory was freed",
    "isolation/pool.py:_start_fork": "the pause before a further process is tried: no host tells that it has room",
    "actors/generator.py:_report_and_exit": "a single wait before the exit, so that the cause reaches the callers",
    "rpc/requests.py:disconnect": "gives the event loop one tick, which sends the abort",
    "gateway/callers.py:idle": "waits for the rest of the idle time; only a new call repeats it",
    "hosts/agent.py:_guard": "a controller that is cut off tells nobody",
    "metrics/timeline.py:_write_on": "spans are written in batches, once a second",
}
"""`file:function` → why it may."""

WAITS = {"wait", "get", "acquire", "join", "recv", "shield", "wait_closed"}
"""Methods and functions that wait until something else happens."""
TIMED = {"wait", "wait_for", "get", "join", "poll", "select", "acquire", "result"}
"""Methods and functions that wait for a while where they are given a time-out."""


def waits(tree: ast.AST) -> Iterator[str]:
    """The functions with an await that has no bound of its own."""
    for function, node, _, bounded in nodes(tree):
        if isinstance(node, ast.Await) and not bounded and _waits(node.value):
            yield function


def polls(tree: ast.AST) -> Iterator[str]:
    """The functions that sleep, or wait with a time-out that a loop repeats."""
    for function, node, in_loop, _ in nodes(tree):
        if isinstance(node, ast.Call) and (_sleeps(node) or (in_loop and _is_timed(node))):
            yield function


def nodes(tree: ast.AST) -> Iterator[tuple[str, ast.AST, bool, bool]]:
    """(function, node, whether a loop repeats it, whether a time-out is around it) of every node."""

    def visit(node: ast.AST, function: str, in_loop: bool, bounded: bool) -> Iterator[tuple[str, ast.AST, bool, bool]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, in_loop, bounded = node.name, False, False
        in_loop = in_loop or isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        if isinstance(node, ast.AsyncWith):
            bounded = bounded or any("timeout" in ast.unparse(item.context_expr) for item in node.items)
        yield function, node, in_loop, bounded
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, in_loop, bounded)

    return visit(tree, "<module>", False, False)


def _called(call: ast.Call) -> tuple[str, str]:
    """(whose method, its name); of a function nobody's."""
    if isinstance(call.func, ast.Attribute):
        return getattr(call.func.value, "id", "?"), call.func.attr
    return "", getattr(call.func, "id", "")


def _waits(awaited: ast.expr) -> bool:
    if not isinstance(awaited, ast.Call):
        return isinstance(awaited, (ast.Name, ast.Attribute, ast.Subscript))
    return _called(awaited)[1] in WAITS and all(keyword.arg != "timeout" for keyword in awaited.keywords)


def _sleeps(call: ast.Call) -> bool:
    owner, called = _called(call)
    return called == "sleep" and owner in ("", "asyncio", "time")


def _is_timed(call: ast.Call) -> bool:
    """Whether it waits for so long at most: `wait(timeout=1)`, `event.wait(1)`, `queue.get(True, 1)`, `wait_for(…)`."""
    owner, called = _called(call)
    if any(keyword.arg in ("timeout", "timeout_seconds") for keyword in call.keywords) or called == "wait_for":
        return called in TIMED
    if called == "wait":
        return bool(call.args) and owner not in ("", "asyncio")
    if called in ("get", "acquire"):
        return bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, bool)
    return called == "poll" and bool(call.args) and ast.unparse(call.args[0]) != "0"  # which only looks


def found_by(look: Callable[[ast.AST], Iterator[str]]) -> set[str]:
    return {
        f"{path.relative_to(PACKAGE)}:{function}"
        for path in PACKAGE.rglob("*.py")
        for function in look(ast.parse(path.read_text()))
    }


@pytest.mark.parametrize(("look", "named"), [(waits, ENDED_BY), (polls, EXCEPTIONS)])
def test_each_wait_without_a_bound_and_each_poll_is_named_with_its_reason(
    look: Callable[[ast.AST], Iterator[str]], named: dict[str, str]
) -> None:
    found = found_by(look)
    assert found - {*named} == set(), "say why they may"
    assert {*named} - found == set(), "they are gone"


UNBOUNDED = ("await event.wait()", "await future", "await asyncio.wait({task})", "await inbox.get()")
BOUNDED = (
    "await asyncio.wait({task}, timeout=1)",
    "await client.call()",
    "async with asyncio.timeout(1): await event.wait()",
)
POLLS = (
    "async def f():\n    while True:\n        await asyncio.sleep(1)",
    "def f():\n    time.sleep(0.1)",
    "def f():\n    from time import sleep\n    sleep(1)",
    "def f():\n    while not done:\n        event.wait(timeout=1)",
    "def f():\n    while not event.wait(0.05): pass",
    "async def f():\n    while True:\n        await asyncio.wait_for(q.get(), 1)",
    "def f():\n    for _ in range(9):\n        queue.get(timeout=2)",
    "def f():\n    for _ in range(9):\n        queue.get(True, 2)",
)
SINGLE_WAITS = (
    "async def f():\n    await asyncio.wait_for(event.wait(), 5)",
    "def f():\n    while True:\n        queue.get()",
    "def f():\n    while True:\n        words.get(name, 0), ', '.join(names)",
    "def f(engine):\n    engine.sleep(level=1)",
)


@pytest.mark.parametrize(
    ("look", "code", "seen"),
    [
        *((waits, f"async def f():\n    {code}", code in UNBOUNDED) for code in (*UNBOUNDED, *BOUNDED)),
        *((polls, code, code in POLLS) for code in (*POLLS, *SINGLE_WAITS)),
    ],
)
def test_only_waits_without_a_bound_and_polls_are_seen(
    look: Callable[[ast.AST], Iterator[str]], code: str, seen: bool
) -> None:
    assert {*look(ast.parse(code))} == ({"f"} if seen else set())
