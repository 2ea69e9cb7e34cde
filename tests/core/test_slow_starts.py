"""Nobody waits for a start that has failed, and no process outlives a stop that is given up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.supervision.provisioner import SpawnedProcesses

pytestmark = pytest.mark.asyncio


async def test_a_start_that_fails_is_over() -> None:
    fails: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fails.set_exception(OSError("it could not be spawned"))
    host: Any = SimpleNamespace(lost="")
    mesh = SpawnedProcesses("generator1", "generator1-0", [(host, SimpleNamespace(initialized=fails), 1)])
    assert await asyncio.wait_for(mesh.started(), 5) == "it could not be spawned"


async def test_a_stop_that_is_given_up_ends_the_processes() -> None:
    began, ended = asyncio.Event(), []

    async def wake(spawn: str) -> None:
        began.set()
        await asyncio.Event().wait()

    async def end(spawn: str) -> None:
        ended.append(spawn)

    host: Any = SimpleNamespace(lost="", wake=wake, end=end)
    mesh = SpawnedProcesses("generator1", "generator1-0", [(host, SimpleNamespace(), 1)])
    stopping = asyncio.create_task(mesh.stop())
    await began.wait()
    stopping.cancel()
    await asyncio.wait([stopping])
    assert ended == ["generator1-0"]
