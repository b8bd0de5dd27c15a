"""RMSNorm and its gradients against the definition."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.norm_concat import norm_concat, norm_concat_reference
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


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)], ids=str)
def test_gradients(shape: tuple[int, ...]):
    """Of rows and weight, against numerical ones in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(12, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_narrow_types(dtype: torch.dtype):
    """As near to those of float64 as the type lets them be."""
    generator = torch.Generator().manual_seed(1)
    exact = [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).double()
        for size in ((40, 75), (75,))
    ]
    pulled = torch.randn(40, 75, generator=generator, dtype=torch.float64).to(dtype)
    found = []
    for kind in (dtype, torch.float64):
        x, weight = (value.to(kind).requires_grad_() for value in exact)
        out = rms_norm(x, weight, 1e-5)
        found.append(torch.autograd.grad(out, (x, weight), pulled.to(kind)))
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("normed", [(True, True), (True, False), (False, True), (False, False)])
def test_two_halves_side_by_side(dtype: torch.dtype, normed: tuple[bool, bool]):
    """Rows of other strides, either half without a norm: with and without a gradient bit for bit
    the definition."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(7, 24, generator=generator).to(dtype)[:, k : k + 20] for k in (0, 3))
    left, right = (
        torch.rand(20, generator=generator).to(dtype).requires_grad_() if one else None
        for one in normed
    )
    expected = norm_concat_reference(a, b, left, right, 1e-5)
    assert torch.equal(norm_concat(a, b, left, right, 1e-5), expected)
    with torch.no_grad():
        out = norm_concat(a, b, left, right, 1e-5)
    assert out.dtype == dtype and torch.equal(out, expected)
