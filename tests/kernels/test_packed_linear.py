"""The packed product and its fused endings against the plain definition."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.packed_linear import (
    GatedLinear,
    PackedLinear,
    can_pack,
    can_tile,
    linear_reference,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 65, 300])
@pytest.mark.parametrize("then", ["none", "silu", "mul", "add"])
@pytest.mark.parametrize("size", [37, 96])
def test_equals_the_definition(dtype: torch.dtype, rows: int, then: str, size: int):
    """Odd sizes and such that tiles take, few and many rows, every ending; the definition is taken
    in float64."""
    torch.manual_seed(rows)
    weight = (torch.randn(71, size) * 0.2).to(dtype)
    x, other = torch.randn(rows, size).to(dtype), torch.randn(rows, 71).to(dtype)
    out = PackedLinear(weight)(x, then, other if then in ("mul", "add") else None)
    expected = linear_reference(x.double(), weight.double(), then, other.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if then == "none":
        wide = PackedLinear(weight).widened(x)
        assert wide.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(wide, out.to(wide.dtype))


def test_float64_is_not_packed():
    """oneDNN has no float64 layout; the plain product must run."""
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (40, 64), (3, 37)])
def test_a_gated_product_equals_the_definition(dtype: torch.dtype, rows: int, size: int):
    """silu(x G^T) * (x U^T) in every form, a number of columns that fills no block."""
    torch.manual_seed(rows)
    gate, up = ((torch.randn(71, size) * 0.2).to(dtype) for _ in range(2))
    x = torch.randn(rows, size).to(dtype)
    expected = linear_reference(x.double(), gate.double(), "silu") * (x.double() @ up.double().T)
    out = GatedLinear(gate, up)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.skipif(not can_tile(torch.zeros(1, 32).bfloat16()), reason="no tiles on this machine")
def test_a_row_does_not_depend_on_what_is_beside_it():
    """Bit for bit, whether one row, a chain or a prompt is multiplied; strided rows are read as
    they are, and nothing behind them."""
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(71, 96).bfloat16())
    wide = torch.full((300, 128), float("nan")).bfloat16()
    wide[:, :96] = torch.randn(300, 96)
    x = wide[:, :96]
    together = linear(x)
    for first, last in ((0, 1), (5, 9), (30, 47), (280, 300)):
        assert torch.equal(linear(x[first:last]), together[first:last])
