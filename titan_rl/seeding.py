"""Seeds that depend on what is asked, never on when it arrives.

`request_seed` is a pure function of the run seed and the request's place in the run, so two runs that ask for
the same things draw the same tokens whatever the order, the batching or the number of generators.
"""

import hashlib

from titan_rl.types import Purpose

_SEED_BITS = 63


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that differs (with near certainty) whenever any part differs."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def request_seed(run_seed: int, purpose: Purpose, group_id: int, sample: int, turn: int = 0) -> int:
    """Seed of one request. An interrupted completion goes on with the same seed."""
    return derive_seed(run_seed, purpose.value, group_id, sample, turn)
