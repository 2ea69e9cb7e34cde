"""What a checkpoint makes of an object with a `state_dict`."""

from __future__ import annotations

import json
from typing import Any, TypeVar

T = TypeVar("T")


def saved_and_read(saved: T, *arguments: Any) -> T:
    state = json.loads(json.dumps(saved.state_dict()))  # type: ignore[attr-defined]
    return type(saved).from_state_dict(state, *arguments)  # type: ignore[attr-defined]
