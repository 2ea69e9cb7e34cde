"""Which environment variables processes of user code see: what programs need, and what the user names. No secrets.

This keeps keys out of what user code prints, records and sends by mistake. It is no wall: a process of the same user
can read other processes' variables and files.
"""

from __future__ import annotations

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

logger = logging.getLogger(__name__)


def host_variables(environment: str, named: Sequence[str]) -> dict[str, str]:
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
    """The variables that user code may see.

    Args:
        named: by the user, besides.
    """
    return {name: value for name, value in environ.items() if name in named or _needed(name)}


def _needed(name: str) -> bool:
    if name in PASSED:
        return True
    rest = next((name.removeprefix(each) for each in PASSED_BEGINNINGS if name.startswith(each)), None)
    return rest is not None and not any(word in rest.upper() for word in SECRET)
