"""The likeliest tokens of a row against their definition."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.top_ranked import top_ranked, top_ranked_reference


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("size", [7, 37, 1000])
def test_equals_the_definition(dtype: torch.dtype, count: int, size: int):
    """Many equal values, masked tokens, strided rows; of equals the earlier ones."""
    torch.manual_seed(size + count)
    x = torch.randint(-3, 4, (40, size + 3)).to(dtype)[:, :size]
    x[::3] = torch.randn(14, size).to(dtype)
    x[5:20, : size // 2] = float("-inf")
    chances, places = top_ranked(x, count)
    expected, _ = top_ranked_reference(x, count)
    torch.testing.assert_close(
        chances, expected, rtol=0, atol=1e-12 if x.element_size() == 8 else 2e-6
    )
    order = [sorted(range(size), key=lambda i, row=row: (-row[i], i)) for row in x.tolist()]
    assert places.tolist() == [row[:count] for row in order]


def test_no_chance_is_above_one_and_what_is_no_number_is_told():
    """A row of one token that has all the mass; a row that holds a NaN anywhere."""
    x = torch.full((30, 300), -200.0)
    x[:, 7] = 40.0
    assert top_ranked(x, 2)[0][:, 0].max() == 0
    for row in range(30):
        x[row, 10 * row + 5] = float("nan")
    assert top_ranked(x, 2)[0].isnan().all()
