"""What an environment's host is started with: the variables that user code sees, and the end of the pipe it prints to.

- User code sees the variables that programs need, and those that the user names. No secrets: this keeps keys out of
  what it prints, records and sends by mistake. It is no wall.
- What processes of user code print is logged line by line, control characters as escapes, so much in so many seconds.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_rl.one_line import escaped

PASSED = frozenset(
    "PATH HOME USER LOGNAME SHELL PWD HOSTNAME TERM COLUMNS LANG LANGUAGE TZ TMPDIR TMP TEMP LD_LIBRARY_PATH "
    "LD_PRELOAD VIRTUAL_ENV JAVA_HOME NODE_PATH REQUESTS_CA_BUNDLE CURL_CA_BUNDLE MALLOC_ARENA_MAX "
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy".split()
)

PASSED_BEGINNINGS = tuple(
    "LC_ XDG_ PYTHON SSL_CERT_ CONDA_ CUDA_ NVIDIA_ OMP_ MKL_ OPENBLAS_ NUMEXPR_ NUMBA_ TOKENIZERS_ HF_ TRANSFORMERS_ "
    "TITAN_RL_".split()
)

SECRET = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")
"""A variable such as HF_TOKEN, with one of these after its beginning, is passed on only where the user names it."""

MAX_LOG_LINE = 4096
"""Longer lines of output are logged in pieces."""
LOG_SECONDS, LOG_BYTES = 10.0, 1 << 20
"""So many bytes of output are logged in so many seconds; the rest is counted: endless output would fill the disk."""

logger = logging.getLogger(__name__)


def user_variables(environment: str, named: Sequence[str]) -> dict[str, str]:
    """The variables of an environment's host. Logs the names of those that are withheld."""
    passed = passed_on(os.environ, named)
    if withheld := sorted(os.environ.keys() - passed.keys()):
        logger.info(
            "environment %s does not see these variables, unless environment.variables names them: %s",
            environment,
            escaped(" ".join(withheld)),
        )
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    # sets of strings are iterated in hash order, and a restarted process has to draw the same examples
    return {"PYTHONHASHSEED": "0", **passed, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


def passed_on(environ: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The variables that user code may see. `named`: by the user, besides."""
    return {name: value for name, value in environ.items() if name in named or _needed(name)}


def _needed(name: str) -> bool:
    if name in PASSED:
        return True
    rest = next((name.removeprefix(each) for each in PASSED_BEGINNINGS if name.startswith(each)), None)
    return rest is not None and not any(word in rest.upper() for word in SECRET)


class LogLines(asyncio.Protocol):
    """The reading end of a pipe that processes print to. `ended`: is done when nobody has the other end open any
    more."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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
        self.ended.set_result(None)
