"""The packed product and its fused endings against the plain definition."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.packed_linear import PackedLinear, can_pack, linear_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 65])
@pytest.mark.parametrize("then", ["none", "silu", "mul", "add"])
def test_equals_the_definition(dtype: torch.dtype, rows: int, then: str):
    """Odd sizes, few and many rows, every ending; the definition is taken in float64."""
    torch.manual_seed(rows)
    weight = (torch.randn(71, 37) * 0.2).to(dtype)
    x, other = torch.randn(rows, 37).to(dtype), torch.randn(rows, 71).to(dtype)
    out = PackedLinear(weight)(x, then, other if then in ("mul", "add") else None)
    expected = linear_reference(x.double(), weight.double(), then, other.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_float64_is_not_packed():
    """oneDNN has no float64 layout; the plain product must run."""
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float64))
