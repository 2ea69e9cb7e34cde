"""Nobody waits for processes that will never start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.launch.provisioner import Mesh

pytestmark = pytest.mark.asyncio


async def test_what_starts_is_waited_for_until_it_is_stopped() -> None:
    starts: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    lost: Any = SimpleNamespace(lost="it is cut off")
    processes: Any = SimpleNamespace(initialized=starts)
    mesh = Mesh("generator1", "generator1-0", [(lost, processes, 1)])
    waiting = asyncio.ensure_future(mesh.started())
    await asyncio.sleep(0)
    assert not waiting.done()
    await mesh.stop(kill=True)
    await asyncio.wait_for(waiting, 5)


async def test_a_start_that_fails_is_over() -> None:
    fails: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fails.set_exception(OSError("it could not be spawned"))
    host: Any = SimpleNamespace(lost="")
    mesh = Mesh("generator1", "generator1-0", [(host, SimpleNamespace(initialized=fails), 1)])
    assert await asyncio.wait_for(mesh.started(), 5) == "it could not be spawned"
