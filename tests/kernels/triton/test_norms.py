"""The fused norms against their definitions: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.kernels import rms_norm as module
from draftsmith.kernels.add_norm import add_norm, add_norm_reference
from draftsmith.kernels.norm_concat import norm_concat, norm_concat_reference
from draftsmith.kernels.rms_norm import norm_backward, rms_norm, rms_norm_reference

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
EPS = 1e-5


def _inputs(rows: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Two [rows, size] inputs of very different row sizes, no value close to 0 (the derivative of a
    row of one value is a difference of equals over it), and two weights, all with a gradient."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(rows + size)
    scale = torch.logspace(-1, 2, max(rows, 1), dtype=torch.float64)[:rows, None]
    inputs = [torch.randn(rows, size, generator=generator) for _ in range(2)]
    inputs = [(x + x.sign()) * scale for x in inputs]
    weights = [torch.rand(size, generator=generator) + 0.5 for _ in range(2)]
    return [tensor.to(dtype).requires_grad_() for tensor in (*inputs, *weights)]


def _assert_alike(
    op: Callable[..., tuple[Tensor, ...]],
    reference: Callable[..., tuple[Tensor, ...]],
    inputs: list[Tensor],
) -> None:
    """Outputs and gradients of a random direction, the definition's in float64."""
    tolerance = TOLERANCE[inputs[0].dtype]
    outputs = op(*inputs)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = reference(*exact)
    directions = [torch.randn(out.shape).to(out.dtype) for out in outputs]
    grads = torch.autograd.grad(outputs, inputs, directions)
    wanted = torch.autograd.grad(expected, exact, [d.double() for d in directions])
    for got, want in zip((*outputs, *grads), (*expected, *wanted), strict=True):
        assert got.dtype == inputs[0].dtype
        scale = max(1.0, float(want.detach().abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows,size", [(0, 75), (1, 1), (1, 64), (5, 75), (11, 33)])
def test_both_halves_are_normed_and_laid_side_by_side(
    rows: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """No row, one value, odd widths, more rows than programs of the backward pass."""
    monkeypatch.setattr(module, "_PARTS", 4)
    _assert_alike(
        lambda a, b, v, w: (norm_concat(a, b, v, w, EPS),),
        lambda a, b, v, w: (norm_concat_reference(a, b, v, w, EPS),),
        _inputs(rows, size, dtype),
    )


@pytest.mark.parametrize("absent", [0, 1])
def test_a_half_without_a_norm_passes_through(absent: int):
    """The other half keeps its weight's gradient."""
    a, b, *weights = _inputs(5, 75, torch.float32)

    def with_one(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda a, b, w: (op(a, b, *((None, w) if absent == 0 else (w, None)), EPS),)

    _assert_alike(
        with_one(norm_concat), with_one(norm_concat_reference), [a, b, weights[1 - absent]]
    )
    passed = norm_concat(a, b, *((None, weights[1]) if absent == 0 else (weights[0], None)), EPS)
    half = passed[:, :75] if absent == 0 else passed[:, 75:]
    assert torch.equal(half, (a, b)[absent])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows,size", [(0, 75), (1, 3), (5, 75)])
def test_the_residual_sum_comes_out_beside_its_norm(rows: int, size: int, dtype: torch.dtype):
    """Both outputs carry a gradient into both inputs."""
    _assert_alike(
        lambda x, y, w: add_norm(x, y, w, EPS),
        lambda x, y, w: add_norm_reference(x, y, w, EPS),
        _inputs(rows, size, dtype)[:3],
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_norm_of_strided_rows(dtype: torch.dtype):
    """Rows of a wider buffer, NaN between them."""
    wide = torch.full((7, 100), float("nan"), dtype=dtype)
    wide[:, 3:78] = torch.randn(7, 75).to(dtype)
    x, weight = wide[:, 3:78], torch.rand(75).to(dtype)
    expected = rms_norm_reference(x.double(), weight.double(), EPS)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        rms_norm(x, weight, EPS).double(), expected, rtol=tolerance, atol=tolerance
    )


def test_rows_lie_further_apart_than_32_bits_count(far_memory: Callable[[int], Tensor]):
    """Row 2 of a stride of 2**30 begins at element 2**31."""
    x = far_memory(64).as_strided((3, 40), (2**30, 1))
    near = torch.randn(3, 40).to(torch.bfloat16)
    x.copy_(near)
    weight, grad = torch.rand(40).to(torch.bfloat16), torch.randn(3, 40).to(torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(near, weight, EPS))
    for far, close in zip(
        norm_backward(x, weight, grad, EPS), norm_backward(near, weight, grad, EPS), strict=True
    ):
        assert torch.equal(far, close)


def test_halves_that_do_not_fit_are_refused():
    """A state of another width or dtype names both shapes."""
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"\[2, 4\].*\[2, 3\]"):
        norm_concat(x, torch.zeros(2, 3), None, None, EPS)
    with pytest.raises(ValueError, match="bfloat16"):
        add_norm(x, x.bfloat16(), torch.ones(4), EPS)
