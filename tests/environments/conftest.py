"""What a script changes in the process of its rollout is undone after each test."""

import os
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True)
def process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"argv": sys.argv, "path": sys.path[:], "stdin": sys.stdin}.items():
        monkeypatch.setattr(sys, name, value)
    with patch.dict(os.environ):
        yield
