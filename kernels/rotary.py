"""Rotary embedding of heads that lie side by side in one buffer, in place.

    x_i = x_i cos_i + x_{i + D/2} sin_i        i < D/2, where sin is negated
    x_i = x_i cos_i + x_{i - D/2} sin_i        i >= D/2

the turn of halves of GPT-NeoX, Llama and their relatives. Inference only: no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .native import INTEGER, POINTER, SMALL, TYPES, Native

_NATIVE = Native(
    "rotary",
    {
        "rotate": [SMALL, POINTER, INTEGER, INTEGER, POINTER, INTEGER, POINTER, INTEGER]
        + [INTEGER, INTEGER, INTEGER]
    },
)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The plain definition, see `rotate`."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    x.copy_(x * cos[:, None] + swapped * sin[:, None])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See the module's formula.

    Args:
        x: [N, heads, D], unit stride in D; overwritten. cos, sin: [N, D] in x's dtype, unit stride,
            the first half of sin negated.
    """
    if not _NATIVE.serves(x):
        rotate_reference(x, cos, sin)
        return
    assert x.stride(2) == cos.stride(1) == sin.stride(1) == 1
    assert cos.dtype == sin.dtype == x.dtype and x.shape[2] % 2 == 0
    n, heads, size = x.shape
    _NATIVE.functions.rotate(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        cos.stride(0),
        sin.data_ptr(),
        sin.stride(0),
        n,
        heads,
        size,
    )
