"""Every await that has no bound of its own is named here with who ends it: nothing waits for ever.

A wait has no bound of its own if it waits for a future, an event, a queue or tasks, outside of `asyncio.timeout` and
without a `timeout`. Read from the syntax trees. Calls of coroutines end with what they await, and calls to actors with
their connection (`actors/connection.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "titan_rl"

ENDED_BY = {
    "commands/typed.py:_line": "the next line that the person types, or the end of the input",
    "actors/connection.py:_ended": "Monarch ends the call with the process of the actor",
    "actors/connection.py:_receive": "`_ended` cancels it, when the actor or its process is gone",
    "actors/connection.py:gone": "`_connect` ends with the process; who asked cancels it",
    "actors/connection.py:connect": "the client says when it leaves; of one that died the task stays, idle",
    "actors/gateway.py:_of_session": "a call to the gateway: the idle time or the end of the rollout, or its process",
    "actors/generator.py:_outcome": "the engine loop answers, or fails the generator; a hang is found by its pulse",
    "actors/relay.py:_take": "the reads, which have a bound, and `Connection.gone`",
    "actors/relay.py:arrived": "the transfer of the chunk, whose calls have a bound; if it fails, so does this",
    "actors/relay.py:bring": "the transfer, whose calls have a bound, or the publication that takes its place",
    "actors/request_router.py:_until": "every request that ends; `_end` fails the router",
    "actors/requests.py:_stopped": "the engine answers a request that is given up; a hang is found by its pulse",
    "actors/rollout_worker.py:run_group": "a group whose environments have time limits; its requests have one too",
    "actors/rollouts.py:run_group": "a call to a worker, which ends with its process; environments have time limits",
    "actors/rollouts.py:setup": "a call with a bound of its own",
    "actors/router_client.py:_generate": "`router.request_seconds`; a lost router is replaced and asked again",
    "actors/router_client.py:stream": "the completion of the same request, which ends as in `_generate`",
    "actors/trainer.py:run": "the calls before it; a stuck rank is found by its pulse; the caller has a bound",
    "controller/checkpoints.py:written": "calls with a bound, then the disk; a stopped run waits SAVE_SECONDS",
    "controller/faults.py:_until_either": "any fault or signal, or the end of the mesh or of the work",
    "controller/faults.py:unless_fatal": "the work, whose calls wait so long for a trainer that is replaced",
    "controller/loop.py:_train": "the step, whose calls have a bound",
    "controller/loop.py:_until": "every change of the ledger; the watchdog says who stands still",
    "controller/loop.py:save": "the step, whose calls have a bound; a stopped run waits SAVE_SECONDS",
    "controller/publications.py:publish": "a release; the watchdog names the holders",
    "controller/recording.py:_write": "a call to the workers with a bound of its own",
    "controller/recording.py:settled": "a call to the workers with a bound of its own, then the disk",
    "controller/stages.py:_shown": "a call to a worker, which ends with its process",
    "environments/rubric.py:score_async": "user code: the sandbox kills it after `environment.step_seconds`",
    "environments/rubric.py:score_group_async": "user code: the sandbox kills it after `environment.step_seconds`",
    "environments/tools.py:answer": "user code: the sandbox kills it after `environment.step_seconds`",
    "gateway/app.py:close": "the HTTP server ends its calls when the keys are ended; the caller has a bound",
    "gateway/app.py:ended": "stays open: `Meshes` watches it for as long as the gateway lives",
    "gateway/callers.py:_awaited": "`unless` cancels it",
    "gateway/callers.py:idle": "open calls end with their requests; the end of the rollout",
    "gateway/callers.py:unless": "the end that it is given",
    "gateway/sampling.py:__anext__": "the requests, which end",
    "gateway/sampling.py:run": "the thread of the jobs, which are short",
    "launch/meshes.py:place": "calls to agents, which have a bound",
    "launch/fleet.py:_add": "calls to agents, which have a bound",
    "launch/fleet.py:rejoin": "calls to agents, which have a bound",
    "launch/meshes.py:until": "the end of a mesh or its start, which are bounded; `close` cancels who waits",
    "launch/provisioner.py:started": "Monarch, the loss of a host, or the mesh's stop",
    "launch/meshes.py:watched": "the work of a replacement; `close` cancels it",
    "rollout/rollouter.py:_idle": "`_until_over` cancels it",
    "rollout/rollouter.py:_until_over": "the program, its idle time, or its end",
    "rollout/rollouter.py:close": "the sessions, whose programs have been ended",
    "rollout/rollouter.py:run": "the session, which ends with its program",
    "sandbox/host_process.py:fork": "the host forks it, or is killed after KILL_SECONDS",
    "sandbox/sandbox.py:_run_alone": "the host kills the process, or is killed after KILL_SECONDS",
    "sandbox/sandbox.py:call": "the scheduler: an answer, the time limit, or the end of the process",
    "sandbox/user_code.py:_awaited": "user code: the sandbox kills it after `environment.step_seconds`",
    "sandbox/user_code.py:_perform": "user code: the sandbox kills it after `environment.step_seconds`",
}
"""`file:function` → what ends the wait, also when its other side is gone."""

WAITS = {"wait", "get", "acquire", "join", "recv", "shield", "wait_closed"}
"""Methods and functions that wait until something else happens."""


def waits(tree: ast.AST) -> Iterator[str]:
    """The functions with an await that has no bound of its own."""

    def visit(node: ast.AST, function: str, bounded: bool) -> Iterator[str]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, bounded = node.name, False
        if isinstance(node, ast.AsyncWith):
            bounded = bounded or any("timeout" in ast.unparse(item.context_expr) for item in node.items)
        if isinstance(node, ast.Await) and not bounded and _waits(node.value):
            yield function
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, bounded)

    yield from visit(tree, "<module>", False)


def _waits(awaited: ast.expr) -> bool:
    if not isinstance(awaited, ast.Call):
        return isinstance(awaited, (ast.Name, ast.Attribute, ast.Subscript))
    called = awaited.func.attr if isinstance(awaited.func, ast.Attribute) else getattr(awaited.func, "id", "")
    return called in WAITS and all(keyword.arg != "timeout" for keyword in awaited.keywords)


def test_each_wait_without_a_bound_is_named_with_what_ends_it() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{function}"
        for path in PACKAGE.rglob("*.py")
        for function in waits(ast.parse(path.read_text()))
    }
    assert found - set(ENDED_BY) == set(), "say what ends them"
    assert set(ENDED_BY) - found == set(), "they are gone"


@pytest.mark.parametrize(
    "code", ["await event.wait()", "await future", "await asyncio.wait({task})", "await inbox.get()"]
)
def test_a_wait_without_a_bound_would_be_seen(code: str) -> None:
    assert list(waits(ast.parse(f"async def f():\n    {code}"))) == ["f"]


@pytest.mark.parametrize(
    "code",
    [
        "await asyncio.wait({task}, timeout=1)",
        "await client.call()",
        "async with asyncio.timeout(1): await event.wait()",
    ],
)
def test_a_wait_with_a_bound_is_none(code: str) -> None:
    assert not list(waits(ast.parse(f"async def f():\n    {code}")))
