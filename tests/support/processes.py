"""How tests see processes that rollout workers start: by what they print, and by their end."""

import asyncio
import logging
import os
import re
import select
import signal
import time
from pathlib import Path

import pytest


def ends(pid: int) -> bool:
    """Whether a process, of any parent, is gone or ends within seconds."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(10_000))
    finally:
        os.close(pidfd)


def descendants(pid: int) -> list[int]:
    """Of a process, the youngest last."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


def halt(pid: int) -> None:
    """Send SIGSTOP, and return when every thread stands still: on a busy machine they go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    while not _stands(pid):
        time.sleep(0.001)


def _stands(pid: int) -> bool:
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
        return False
    return all(stat.rpartition(") ")[2][0] in "TtZX" for stat in stats)


class Heard(logging.Handler):
    """Waits for lines that programs print."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self._more = asyncio.Event()

    def emit(self, record):
        self.lines.append(record.getMessage())
        self._more.set()

    async def times(self, beginning, count):
        """Returns when so many lines began so."""
        while sum(line.startswith(beginning) for line in self.lines) < count:
            self._more.clear()
            await self._more.wait()

    async def numbers(self, beginning):
        """Those in the first line that begins so."""
        while True:
            for line in self.lines:
                if line.startswith(beginning):
                    return [int(number) for number in re.findall(r"\d+", line)]
            self._more.clear()
            await self._more.wait()


@pytest.fixture
def heard():
    """What child processes print."""
    logger = logging.getLogger("titan_rl.isolation.process_io")
    level, handler = logger.level, Heard()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
