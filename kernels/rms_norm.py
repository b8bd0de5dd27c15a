"""RMSNorm in few steps, and the derivative that its fused relatives share.

    y  = n * w              n = x * r          r = 1 / sqrt(mean(x^2) + eps)
    dx = r * (g - n * mean(g * n))             g = dy * w
    dw = sum over rows of dy * n

Statistics in at least float32; the normed value is rounded to x's dtype before the weight, as
transformers' Llama does. PyTorch's own `rms_norm` is a dozen small calls on a CPU, which in a
decode pass of a small target are a tenth of the time; this is half of them, and one where the C++
form can be built (`native`). With a gradient it keeps x alone. On a GPU one program takes one row.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .jit import Kernel, power_of_two, use_triton, warps_for
from .native import INTEGER, POINTER, SMALL, TYPES, Native

if TYPE_CHECKING:
    import triton.language as tl

_NATIVE = Native(
    "rms_norm",
    {
        "rms_norm": [SMALL, POINTER, INTEGER, *[POINTER] * 2, *[INTEGER] * 3, ctypes.c_double],
        "rms_norm_backward": [SMALL, *[POINTER] * 5, INTEGER, INTEGER, ctypes.c_double, INTEGER],
    },
)

# Programs of a backward pass; each adds up its rows' part of dw, and the parts are summed in order.
_PARTS = 256


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain definition. x [N, H], weight [H] -> [N, H]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the module's formula; gradients for x and weight.

    Args:
        x: [..., H]. weight: [H], the dtype of x. eps: added to the mean square.
    Returns:
        [..., H], the dtype of x.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps)
    return _forward(x, weight, eps)


def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    own = served(x, weight)
    if own or use_triton(x):
        form = _native if own else _launch
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        return form(rows, weight, eps).view(x.shape)
    accurate = torch.promote_types(x.dtype, torch.float32)
    scale = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=accurate)
    scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = (x * scale).to(x.dtype)  # promoted to `accurate` by the product
    return normed.mul_(weight)


class _RMSNorm(torch.autograd.Function):
    """Saves its inputs; the scales are taken again in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, slope = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        if use_triton(x):
            dx, dw = norm_backward(rows.contiguous(), weight, slope.contiguous(), ctx.eps)
        elif _NATIVE.serves(x) and weight.dtype == x.dtype == grad.dtype:
            dx, dw = _backward_native(rows, weight, slope, ctx.eps)
        else:
            dx, dw = _backward_plain(rows, weight, slope, ctx.eps)
        return dx.view(x.shape), dw, None


def _backward_plain(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    value, slope = x.to(wide), grad.to(wide)
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    normed = value * scale
    dw = (slope * normed).sum(0)
    slope = slope * weight.to(wide)
    dx = scale * (slope - normed * (slope * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), dw.to(weight.dtype)


def _backward_native(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (rows, size), count = x.shape, torch.get_num_threads()
    x, weight, grad = x.contiguous(), weight.contiguous(), grad.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype)
    parts = torch.empty(count, size, dtype=torch.promote_types(x.dtype, torch.float32))
    pointers = [one.data_ptr() for one in (x, weight, grad, dx, parts)]
    _NATIVE.functions.rms_norm_backward(TYPES[x.dtype], *pointers, rows, size, eps, count)
    return dx, parts.sum(0).to(weight.dtype)


def served(x: Tensor, weight: Tensor) -> bool:
    """Whether `norm_into` takes them."""
    return _NATIVE.serves(x) and _NATIVE.serves(weight) and weight.dtype == x.dtype


def norm_into(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """The C++ form into rows of a tensor that may be wider: x, out [N, H], out of unit stride in
    the last dimension; no gradient."""
    assert out.dtype == x.dtype and out.shape == x.shape and out.stride(1) == 1
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    _NATIVE.functions.rms_norm(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        x.shape[1],
        eps,
    )


def _native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    norm_into(x, weight, eps, out)
    return out


def _launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(x.shape[1])
    if x.shape[0]:
        rms_norm_kernel[(x.shape[0],)](
            x,
            weight.contiguous(),
            out,
            x.stride(0),
            x.shape[1],
            eps,
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return out


@Kernel
def rms_norm_kernel(x, weight, out, stride, size, eps, BLOCK: tl.constexpr):
    """One row of H = `size` values."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    dtype = out.dtype.element_ty
    normed = (value * scale).to(dtype).to(tl.float32)
    result = normed * tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * size + column, result.to(dtype), inside)


def norm_backward(
    x: Tensor, weight: Tensor, grad: Tensor, eps: float, extra: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The module's derivative, in Triton.

    Args:
        x: [N, H] rows that were normed, unit stride in H. grad: [N, H] gradient of y, unit stride
            in H. extra: [N, H] contiguous, a gradient of x from elsewhere to add, or None.
    Returns:
        (dx [N, H] in x's dtype, dw [H] in weight's dtype, summed in float32 in a fixed order).
    """
    rows, size = x.shape
    parts, block = max(1, min(_PARTS, rows)), power_of_two(size)
    dx = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    dw = torch.empty(parts, size, dtype=torch.float32, device=x.device)
    norm_backward_kernel[(parts,)](
        x,
        weight.contiguous(),
        grad,
        extra,
        dx,
        dw,
        x.stride(0),
        grad.stride(0),
        rows,
        size,
        parts,
        eps,
        BLOCK=block,
        num_warps=warps_for(block, lanes=4),
    )
    return dx, dw.sum(0).to(weight.dtype)


@Kernel
def norm_backward_kernel(
    x,
    weight,
    grad,
    extra,
    dx,
    dw,
    x_stride,
    grad_stride,
    rows,
    size,
    parts,
    eps,
    BLOCK: tl.constexpr,
):
    """Every `parts`-th row, and their sum of dw; dx and extra are contiguous."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    scaled = tl.load(weight + column, inside, 0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(0, tl.cdiv(rows - part, parts)):
        row = part + step * parts
        value = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
        slope = tl.load(grad + row * grad_stride + column, inside, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / size + eps)
        normed = value * scale
        total += slope * normed
        slope *= scaled
        result = scale * (slope - normed * (tl.sum(slope * normed) / size))
        if extra is not None:
            result += tl.load(extra + row * size + column, inside, 0.0).to(tl.float32)
        tl.store(dx + row * size + column, result.to(dx.dtype.element_ty), inside)
    tl.store(dw + part * size + column, total, inside)
