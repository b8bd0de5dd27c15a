"""The input of a head's projection: two normed halves side by side, written once.

    out = [norm(a) ; norm(b)]       norm(x) = x / sqrt(mean(x^2) + eps) * w, or x without a norm

In plain PyTorch the two norms are written and then copied by the concatenation; the fused forms
(on a CPU without a gradient, and on a GPU) read a and b once and write out once. The derivative of
each half is `rms_norm`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .jit import Kernel, power_of_two, use_triton, warps_for
from .rms_norm import norm_backward, norm_into, rms_norm, served

if TYPE_CHECKING:
    import triton.language as tl


def norm_concat_reference(
    a: Tensor, b: Tensor, weight_a: Tensor | None, weight_b: Tensor | None, eps: float
) -> Tensor:
    """The plain definition. a, b [N, H], weights [H] or None -> [N, 2H]."""
    halves = []
    for x, weight in ((a, weight_a), (b, weight_b)):
        if weight is None:
            halves.append(x)
        else:
            halves.append(rms_norm(x, weight, eps))
    return torch.cat(halves, -1)


def norm_concat(
    a: Tensor, b: Tensor, weight_a: Tensor | None, weight_b: Tensor | None, eps: float
) -> Tensor:
    """See the module's formula; gradients for both inputs and both weights.

    Args:
        a, b: [N, H], one dtype. weight_a, weight_b: [H] factors (gemma's 1 + w is added by the
            caller), None where that half has no norm.
        eps: added to the mean squares.
    Returns:
        [N, 2H], the dtype of a.
    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if a.shape != b.shape or a.dim() != 2 or a.dtype != b.dtype:
        raise ValueError(
            f"halves {list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype} do not fit: both must "
            "be [N, H] of one dtype"
        )
    if use_triton(a):
        return _NormConcat.apply(a, b, weight_a, weight_b, eps)
    if torch.is_grad_enabled() or not all(
        weight is None or served(x, weight) for x, weight in ((a, weight_a), (b, weight_b))
    ):
        return norm_concat_reference(a, b, weight_a, weight_b, eps)
    out = a.new_empty(a.shape[0], 2 * a.shape[1])
    for x, weight, half in (
        (a, weight_a, out[:, : a.shape[1]]),
        (b, weight_b, out[:, a.shape[1] :]),
    ):
        if weight is None:
            half.copy_(x)
        else:
            norm_into(x, weight, eps, half)
    return out


class _NormConcat(torch.autograd.Function):
    """Saves the inputs only; the scales are taken again in the backward pass."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, weight_a, weight_b, eps: float) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        rows, size = a.shape
        out = torch.empty(rows, 2 * size, dtype=a.dtype, device=a.device)
        block = power_of_two(size)
        if rows:
            norm_concat_kernel[(rows,)](
                a,
                b,
                None if weight_a is None else weight_a.contiguous(),
                None if weight_b is None else weight_b.contiguous(),
                out,
                size,
                eps,
                BLOCK=block,
                num_warps=warps_for(block),
            )
        ctx.save_for_backward(a, b, weight_a, weight_b)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        a, b, weight_a, weight_b = ctx.saved_tensors
        size, grad = a.shape[1], grad.contiguous()
        slopes, weights = [], []
        for x, weight, part in ((a, weight_a, grad[:, :size]), (b, weight_b, grad[:, size:])):
            dx, dw = (part, None) if weight is None else norm_backward(x, weight, part, ctx.eps)
            slopes.append(dx)
            weights.append(dw)
        return *slopes, *weights, None


@Kernel
def norm_concat_kernel(a, b, weight_a, weight_b, out, size, eps, BLOCK: tl.constexpr):
    """One row: both halves of H = `size` values, one after the other."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype = out.dtype.element_ty
    left = tl.load(a + row * size + column, inside, 0.0).to(tl.float32)
    if weight_a is not None:
        scale = tl.rsqrt(tl.sum(left * left) / size + eps)
        left = (left * scale).to(dtype).to(tl.float32)
        left *= tl.load(weight_a + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * 2 * size + column, left.to(dtype), inside)
    right = tl.load(b + row * size + column, inside, 0.0).to(tl.float32)
    if weight_b is not None:
        scale = tl.rsqrt(tl.sum(right * right) / size + eps)
        right = (right * scale).to(dtype).to(tl.float32)
        right *= tl.load(weight_b + column, inside, 0.0).to(tl.float32)
    tl.store(out + (row * 2 + 1) * size + column, right.to(dtype), inside)
