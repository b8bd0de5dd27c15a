"""A residual sum and the norm that reads it, in one pass over memory.

    s = x + residual        y = s / sqrt(mean(s^2) + eps) * w
    dx = dresidual = d(norm)(s, dy) + ds            dw as in `rms_norm`

s is rounded to x's dtype before it is normed, as a layer that writes it and reads it again does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .jit import Kernel, power_of_two, use_triton, warps_for
from .rms_norm import norm_backward, rms_norm

if TYPE_CHECKING:
    import triton.language as tl


def add_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The plain definition. x, residual [N, H], weight [H] -> (y, s), each [N, H]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See the module's formula; gradients for x, residual and weight.

    Args:
        x, residual: [N, H], one dtype. weight: [H]. eps: added to the mean square.
    Returns:
        (the normed sum, the sum), each [N, H] in the dtype of x.
    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if x.shape != residual.shape or x.dim() != 2 or x.dtype != residual.dtype:
        raise ValueError(
            f"x {list(x.shape)} {x.dtype} and residual {list(residual.shape)} {residual.dtype} do "
            "not fit: both must be [N, H] of one dtype"
        )
    if not use_triton(x):
        return add_norm_reference(x, residual, weight, eps)
    return _AddNorm.apply(x, residual, weight, eps)


class _AddNorm(torch.autograd.Function):
    """Saves the sum, which the caller keeps anyway."""

    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor, weight: Tensor, eps: float):
        x, residual = x.contiguous(), residual.contiguous()
        normed, total = torch.empty_like(x), torch.empty_like(x)
        rows, size = x.shape
        block = power_of_two(size)
        if rows:
            add_norm_kernel[(rows,)](
                x,
                residual,
                weight.contiguous(),
                normed,
                total,
                size,
                eps,
                BLOCK=block,
                num_warps=warps_for(block),
            )
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_total: Tensor):  # type: ignore[override]
        total, weight = ctx.saved_tensors
        slope, dw = norm_backward(
            total, weight, grad.contiguous(), ctx.eps, grad_total.contiguous()
        )
        return slope, slope, dw, None


@Kernel
def add_norm_kernel(x, residual, weight, normed, total, size, eps, BLOCK: tl.constexpr):
    """One row of H = `size` values."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype = normed.dtype.element_ty
    value = tl.load(x + row * size + column, inside, 0.0).to(tl.float32)
    value += tl.load(residual + row * size + column, inside, 0.0).to(tl.float32)
    value = value.to(dtype)
    tl.store(total + row * size + column, value, inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    result = (value * scale).to(dtype).to(tl.float32)
    result *= tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(normed + row * size + column, result.to(dtype), inside)
