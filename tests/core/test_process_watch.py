"""Ends of processes that another thread reaps at once, as Monarch does: each is told, with its exit status."""

import os
import queue
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from titan_rl.launch.child import ProcessWatch

KERNEL = tuple(map(int, os.uname().release.split(".")[:2]))
SECONDS = 30.0
ENDS = [0, 1, 70, 255, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV] * 10


@pytest.mark.skipif(KERNEL < (6, 15), reason="before Linux 6.15 the exit status of a reaped process is lost")
def test_every_exit_status_is_told(tmp_path: Path) -> None:
    told: queue.Queue[tuple[str, int | None] | str] = queue.Queue()
    pipe = tmp_path / "births"
    watch = ProcessWatch("mesh", pipe, on_end=lambda *end: told.put(end), on_stop=told.put)
    for rank, code in enumerate(ENDS):
        end = f"exit {code}" if code >= 0 else f"kill {code} $$"
        process = subprocess.Popen(["sh", "-c", f"echo {rank} $$ > {pipe}; kill -STOP $$; {end}"])
        name = f"mesh rank {rank} (pid {process.pid})"
        assert told.get(timeout=SECONDS) == f"{name} was stopped by SIGSTOP; waiting until it goes on"
        threading.Thread(target=process.wait).start()
        process.send_signal(signal.SIGCONT)
        news = told.get(timeout=SECONDS)
        if news == f"{name} goes on":  # not where the end came so soon that nobody saw it go on
            news = told.get(timeout=SECONDS)
        assert news == (name, code)
    assert watch.any_ended
    watch.end()
