"""`deterministic = true` end to end: trainer, router and vLLM generators, six steps, down to the last bit.

All of it belongs to the acceptance list; in CI test_deterministic_async and test_synchronous_is_staleness_0 compare
runs. Each run is real and takes 20 to 40 s on two free cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from bitwise_loop import Asking, Outcome, small_run, train

pytestmark = pytest.mark.acceptance
Dtype = Literal["float32", "bfloat16"]
_known: dict[tuple[Dtype, int], Outcome] = {}


async def one_generator(dtype: Dtype, directory: Path, *, seed: int = 0) -> Outcome:
    """What every other run is compared with: one generator of one rank, everything asked at once. Run once."""
    if (dtype, seed) not in _known:
        _known[dtype, seed] = one = await train(small_run(seed, dtype, count=1), directory / "one")
        assert one.weights != one.start, "otherwise nothing was trained"
    return _known[dtype, seed]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("generator", "asking"),
    [
        pytest.param({"count": 1}, "all at once", id="the same again"),
        pytest.param({"count": 2}, "all at once", id="2 generators"),
        pytest.param({"count": 2}, "two at a time", id="2 generators, few at a time"),
        pytest.param({"count": 1}, "group by group", id="in groups"),
        pytest.param({"count": 1, "max_num_seqs": 4}, "all at once", id="max_num_seqs 4"),
        pytest.param({"count": 1, "prefix_caching": False}, "all at once", id="no prefix cache"),
        pytest.param({"count": 1, "tensor_parallel": 2}, "all at once", id="TP 2"),
        pytest.param({"count": 2, "tensor_parallel": 2}, "group by group", id="2 generators of TP 2, in groups"),
    ],
)
async def test_the_run_does_not_depend_on_how_its_tokens_are_sampled(
    dtype: Dtype, generator: dict[str, Any], asking: Asking, tmp_path: Path
) -> None:
    one = await one_generator(dtype, tmp_path)
    assert await train(small_run(0, dtype, **generator), tmp_path / "other", asking) == one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_another_seed_is_another_run(dtype: Dtype, tmp_path: Path) -> None:
    one = await one_generator(dtype, tmp_path)
    other = await train(small_run(1, dtype, count=1), tmp_path / "other")
    assert all(a != b for a, b in zip(one, other, strict=True))
