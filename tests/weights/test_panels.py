"""A matrix that is stored in panels is the matrix, in tiles or not, and nothing beside it changes (10 s, compiling)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.weights.panels import store


@settings(deadline=None)
@given(
    count=st.integers(1, 3), rows=st.sampled_from([5, 8, 16, 24, 64]), groups=st.sampled_from([1, 7, 8, 16, 24]),
    width=st.sampled_from([1, 1, 2]), start=st.sampled_from([0, 0, 8, 3]), padding=st.integers(0, 9),
    left=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_panels_hold_the_matrix_and_nothing_beside_them_changes(
    dtype: torch.dtype, count: int, rows: int, groups: int, width: int, start: int, padding: int, left: int, seed: int
) -> None:
    """Also where memory or rows do not lie at multiples of a vector, and where a row goes on beside the part."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.randint(-999, 999, (count * rows, left + groups * width + padding), generator=random, dtype=dtype)
    source = wide[:, left : left + groups * width]
    memory = torch.full((start + count * (groups + 1) * rows * width,), 7777, dtype=dtype)
    steps = ((groups + 1) * rows * width, width, rows * width, 1)
    panels = memory.as_strided((count, rows, groups, width), steps, start)
    store(source, panels)
    assert torch.equal(panels.reshape(source.shape), source)
    panels.fill_(7777)
    assert (memory == 7777).all()
