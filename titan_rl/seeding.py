"""Seeds that depend on what is asked, never on when it arrives.

So two runs that ask for the same things draw the same tokens, whatever the order, the batching or the number of
generators, and also where a program has several calls open at once. Only requests of one rollout with equal prompts are
told apart by their order.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from titan_rl.types import Purpose


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that differs (with near certainty) whenever any part differs."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def request_seed(run_seed: int, purpose: Purpose, group_id: int, sample: int, prompt: str, repeat: int = 0) -> int:
    """Seed of one request, whose prompt has this `prompt_digest` and was asked `repeat` times before in its rollout. An
    interrupted completion goes on with the same seed."""
    return derive_seed(run_seed, purpose.value, group_id, sample, prompt, repeat)


def prompt_digest(token_ids: Sequence[int] | np.ndarray) -> str:
    return hashlib.blake2b(np.asarray(token_ids, dtype=np.int32).tobytes(), digest_size=16).hexdigest()
