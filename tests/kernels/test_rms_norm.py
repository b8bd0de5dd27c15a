"""RMSNorm without a gradient against its definition."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.rms_norm import rms_norm, rms_norm_reference

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_equals_the_definition(dtype: torch.dtype, rows: int):
    """Odd sizes, tiny and huge states (a target's first position is a hundred times the others)."""
    generator = torch.Generator().manual_seed(rows)
    size = torch.logspace(-3, 3, rows, dtype=torch.float64)[:, None]
    x = (torch.randn(rows, 75, generator=generator, dtype=torch.float64) * size).to(dtype)
    weight = torch.rand(75, generator=generator, dtype=torch.float64).to(dtype)
    before = x.clone()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype and torch.equal(x, before)
    expected = rms_norm_reference(x.double(), weight.double(), 1e-5)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
