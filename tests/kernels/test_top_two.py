"""The best two of a row against their definition."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.top_two import top_two, top_two_reference


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 7, 16, 37, 1000])
def test_equals_the_definition(dtype: torch.dtype, size: int):
    """Odd sizes, few values so that many are equal (the first is taken), masked tokens, strided
    rows."""
    torch.manual_seed(size)
    x = torch.randint(-3, 4, (50, size + 3)).to(dtype)[:, :size]
    x[::3] = torch.randn(17, size).to(dtype)
    x[5:20, : size // 2] = float("-inf")
    for mine, expected in zip(top_two(x), top_two_reference(x), strict=True):
        assert torch.equal(mine, expected)
    places = top_two(x)[1].tolist()
    assert places == [row.index(max(row)) for row in x.tolist()]


def test_what_is_no_number_is_told():
    """Wherever it lies; infinity stays infinity."""
    x = torch.zeros(41, 40)
    for row in range(40):
        x[row, row] = float("nan")
    x[40, 3] = float("inf")
    best, place, _ = top_two(x)
    assert best[:40].isnan().all() and best[40] == float("inf") and place[40] == 3
