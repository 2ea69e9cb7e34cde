"""Nothing in titan_rl waits by looking again and again: no sleeps, and no wait with a time-out inside a loop.

Read from the syntax trees, so that a new one has to be named here with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "titan_rl"

EXCEPTIONS = {
    "gateway/openai_client.py:_ask": "the pause before a server that is busy is asked again",
    "commands/watch.py:_looks": "a file tells nobody that it has grown",
    "launch/meshes.py:_start": "the pause before a mesh that keeps failing is started again",
    "launch/fleet.py:rejoin": "the pause before a lost host is tried again",
    "launch/pulse.py:until_still": "a process that hangs tells nobody, nor does a host that is cut off",
    "actors/rollout_worker.py:_report": "the kernel tells nobody that shared memory was freed",
    "sandbox/host_process.py:_socket_pair": "the kernel tells nobody that a descriptor was freed",
    "actors/generator.py:_report_and_exit": "a single wait before the exit, so that the cause reaches the callers",
    "actors/requests.py:disconnect": "gives the event loop one tick, which sends the abort",
    "gateway/callers.py:idle": "waits for the rest of the idle time; only a new call repeats it",
}
"""`file:function` → why it may."""

WAITS = {"wait", "wait_for", "get", "join", "poll", "select", "acquire", "result"}
"""Methods and functions that wait for a while where they are given a time-out."""


def polls(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(function, what it does) for each sleep, and each wait with a time-out that a loop repeats."""

    def visit(node: ast.AST, function: str, in_loop: bool) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, in_loop = node.name, False
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            in_loop = True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if called == "sleep" and (owner is None or getattr(owner, "id", "") in ("asyncio", "time")):
                yield function, "sleeps"
            timed = any(keyword.arg in ("timeout", "timeout_seconds") for keyword in node.keywords)
            if in_loop and called in WAITS and (timed or called == "wait_for"):
                yield function, f"waits with a time-out in a loop ({called})"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, in_loop)

    yield from visit(tree, "<module>", False)


def test_nothing_polls() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{function}": what
        for path in PACKAGE.rglob("*.py")
        for function, what in polls(ast.parse(path.read_text()))
    }
    assert {where: what for where, what in found.items() if where not in EXCEPTIONS} == {}


def test_no_exception_is_kept_after_its_reason_is_gone() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{function}"
        for path in PACKAGE.rglob("*.py")
        for function, _ in polls(ast.parse(path.read_text()))
    }
    assert set(EXCEPTIONS) <= found


@pytest.mark.parametrize(
    "code",
    [
        "async def f():\n    while True:\n        await asyncio.sleep(1)",
        "def f():\n    time.sleep(0.1)",
        "def f():\n    from time import sleep\n    sleep(1)",
        "def f():\n    while not done:\n        event.wait(timeout=1)",
        "async def f():\n    while True:\n        await asyncio.wait_for(q.get(), 1)",
        "def f():\n    for _ in range(9):\n        queue.get(timeout=2)",
    ],
)
def test_a_poll_would_be_seen(code: str) -> None:
    assert list(polls(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "async def f():\n    await asyncio.wait_for(event.wait(), 5)",
        "def f():\n    while True:\n        queue.get()",
        "def f(engine):\n    engine.sleep(level=1)",
    ],
)
def test_a_single_wait_is_no_poll(code: str) -> None:
    assert not list(polls(ast.parse(code)))
