"""Nobody waits for a start that has failed, and no process outlives a stop that is given up. A mesh can be started
while a thread imports torch."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from titan_rl.supervision.provisioner import SpawnedProcesses


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


TORCH = """
import __main__
from types import SimpleNamespace
__main__.begun.set()
__main__.goes_on.wait()
storage = SimpleNamespace(UntypedStorage=type("Untyped", (), {}), TypedStorage=type("Typed", (), {}))
"""
"""In its place, so that it takes as long to import as on a busy host."""
SEND = """
import io, pickle, sys, threading, time
from monarch._src.actor import pickle as monarch_pickle
from titan_rl.supervision import process

if "--prepared" in sys.argv:
    process.send_while_importing()
begun, goes_on, message = threading.Event(), threading.Event(), io.BytesIO()
threading.Thread(target=__import__, args=("torch",), daemon=True).start()
begun.wait()
first = threading.Thread(target=monarch_pickle.torch_dump, args=(1, io.BytesIO()), daemon=True)
first.start()
while not monarch_pickle._torch_pickle_initialized:
    time.sleep(0.001)
monarch_pickle.torch_dump(2, message)
goes_on.set()
first.join()
monarch_pickle.torch_dump(pickle.loads(message.getvalue()), sys.stdout.buffer)
"""


def test_messages_can_be_sent_while_a_thread_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "send.py").write_text(SEND)
    sent = subprocess.run([sys.executable, str(tmp_path / "send.py"), "--prepared"], capture_output=True, timeout=60)
    assert pickle.loads(sent.stdout) == 2, sent.stderr.decode()
    failed = subprocess.run([sys.executable, str(tmp_path / "send.py")], capture_output=True, timeout=60)
    assert b"TypeError" in failed.stderr, "Monarch does not need our help any more"
