"""A host with other versions, or whose clock is off, is refused by name."""

from __future__ import annotations

import time
from typing import Any

import pytest

from titan_rl.errors import ConfigError
from titan_rl.hosts.agent import CLOCK_SECONDS, Introduction, refuse_differences, versions
from titan_rl.hosts.facts import HostFacts


def introduce(differs: dict[str, str], seconds_off: float) -> None:
    known: dict[str, Any] = {"facts": HostFacts(cpus=4), "pid": 1, "scratch": "", "python": ""}
    clock = time.time() + seconds_off
    refuse_differences("host1", Introduction(**known, versions=versions() | differs, clock=clock))


def test_a_host_like_this_one_is_taken() -> None:
    introduce({}, CLOCK_SECONDS / 2)


@pytest.mark.parametrize(
    ("differs", "seconds_off", "why"),
    [
        ({"torch": "2.0.0"}, 0.0, "has torch 2.0.0 installed, .*: install the same versions on every host"),
        ({"vllm": ""}, 0.0, "has vllm not installed"),
        ({"python": "3.9"}, 0.0, "has python 3.9 installed"),
        ({}, -60.0, "differs by (59|60) s: set it"),
        ({}, 60.0, "differs by (59|60) s: set it"),
    ],
)
def test_a_host_that_differs_is_refused(differs: dict[str, str], seconds_off: float, why: str) -> None:
    with pytest.raises(ConfigError, match=f"host1 {why}"):
        introduce(differs, seconds_off)
