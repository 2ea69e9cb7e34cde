"""Logs what processes of user code print: line by line, control characters as escapes, so much in so many seconds."""

from __future__ import annotations

import asyncio
import logging

from titan_rl.one_line import escaped

MAX_LOG_LINE = 4096
"""Longer lines of output are logged in pieces."""
LOG_SECONDS, LOG_BYTES = 10.0, 1 << 20
"""So many bytes of output are logged in so many seconds; the rest is counted: endless output would fill the disk."""

logger = logging.getLogger(__name__)


class LogLines(asyncio.Protocol):
    """The reading end of a pipe that processes print to.

    Args:
        ended: is set when nobody has the other end open any more.
    """

    def __init__(self, ended: asyncio.Event):
        self._ended = ended
        self._rest = b""
        self._since = 0.0
        self._logged = self._dropped = 0  # bytes since then

    def data_received(self, data: bytes) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._since + LOG_SECONDS:
            self._log_dropped()
            self._since, self._logged = now, 0
        if self._logged >= LOG_BYTES:
            self._dropped += len(data)
            return
        self._logged += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LOG_LINE:
            lines.append(self._rest[:MAX_LOG_LINE])
            self._rest = self._rest[MAX_LOG_LINE:]
        for line in lines:
            self._log(line)

    def _log(self, line: bytes) -> None:
        logger.info("%s", escaped(line.decode(errors="replace"), keep="\t"))

    def _log_dropped(self) -> None:
        if self._dropped:
            logger.warning("%d bytes of output were not logged: user code printed too much", self._dropped)
        self._dropped = 0

    def connection_lost(self, error: Exception | None) -> None:
        self._log_dropped()
        if self._rest:
            self._log(self._rest)
        self._ended.set()
