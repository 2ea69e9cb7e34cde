"""The keys of `fingerprint`, for torch and for compiled code. Imports nothing."""

from __future__ import annotations

BLOCK = 1024
"""Elements that share a key. Their places' keys, 8 KiB, must leave most of a first-level cache to the elements: with
twice as many the sum over large tensors takes a quarter longer."""

_MODULUS = 1 << 64


def signed(value: int) -> int:
    """The int64 that is `value` modulo 2**64: what a tensor or a collective can carry."""
    value %= _MODULUS
    return value - _MODULUS if value >= _MODULUS >> 1 else value


def unsigned(value: int) -> int:
    """The inverse of `signed`."""
    return value % _MODULUS


_STEP, _FIRST, _SECOND = map(signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def odd_key(number):  # type: ignore[no-untyped-def]
    """SplitMix64's output number `number` (Steele et al. 2014), made odd: of an int64 in compiled code, or of a tensor.

    The masks make the arithmetic shifts of signed integers logical ones.
    """
    mixed = number * _STEP
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _FIRST
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) | 1
