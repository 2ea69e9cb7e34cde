"""A process that is asked with SIGUSR1 says where each of its tasks is."""

import os
import re
import subprocess
import sys

from titan_rl.processes import answering

ASKED = """
import asyncio, os, signal, sys, threading
from titan_rl.metrics.waits import answer_signals

answer_signals("asked")
never = threading.Event()
threading.Thread(target=never.wait, name="a thread", daemon=True).start()

async def inner():
    await asyncio.Event().wait()

async def call():
    await inner()

async def main():
    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0)
    print("goes on", flush=True)
    sys.stdin.readline()

asyncio.run(main())
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_each_task_is_named_with_the_lines_that_it_is_at() -> None:
    output, answer = start(ASKED).communicate("\n", timeout=60)
    assert output == "goes on\n"
    assert re.search(r"^task call at <string>:13, <string>:10, locks.py:\d+$", answer, re.MULTILINE)
    assert "a thread 0x" in answer and "most recent call first" in answer


def test_a_process_passes_the_signal_on_to_its_children() -> None:
    child = start(ASKED)
    assert child.stdout is not None and child.stdout.readline() == "goes on\n"
    answering.add(os.pidfd_open(child.pid))
    parent = f"import signal\nfrom titan_rl.processes import answering\nanswering.add({{}})\n{ASKED}"
    descriptor = answering.pop()
    try:
        asking = subprocess.run(
            [sys.executable, "-c", parent.format(descriptor)],
            pass_fds=(descriptor,),
            input="\n",
            capture_output=True,
            text=True,
        )
    finally:
        os.close(descriptor)
    assert "1 more processes answer" in asking.stderr
    _, answer = child.communicate("\n", timeout=60)
    assert answer.count("task call at") == 2
