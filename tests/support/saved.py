"""What a checkpoint makes of an object."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def saved_and_read(saved: T) -> T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(saved), type=type(saved))
