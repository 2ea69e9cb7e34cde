"""`titan-rl serve` as a process of its own, for tests of its clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def serving(*arguments: str, key: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command's process, the base URL, and the model's name; the process is stopped as by Ctrl-C at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_rl.cli", "serve", "--port", "0", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TITAN_RL_API_KEY": key},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed = []
    try:
        for line in process.stdout:
            printed.append(line)
            if (told := re.match(r"serving (\S+) at (\S+), with the API key", line)) is not None:
                yield process, told[2], told[1]
                break
        else:
            raise AssertionError("the server did not come up; it printed:\n" + "".join(printed))
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
