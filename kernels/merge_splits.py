"""Attention over pieces of the keys, put together again.

    l = log sum_s e^{l_s}        out = sum_s e^{l_s - l} out_s

for pieces s that are each normalised, with their log-sum-exp l_s (-inf where a piece has no key for
the row). They are added in order, so that a row's sum does not depend on what runs beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .jit import Kernel, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl


def merge_splits_reference(partial: Tensor, mass: Tensor, out: Tensor) -> None:
    """The plain definition, see `merge_splits`."""
    weights = torch.softmax(mass, 0)
    out.copy_((weights[..., None] * partial).sum(0))


def merge_splits(partial: Tensor, mass: Tensor, out: Tensor) -> None:
    """See the module's formula.

    Args:
        partial: [S, N, Hq, Dv] float32, contiguous. mass: [S, N, Hq] float32, contiguous; of every
            row one piece is finite. out: [N, Hq, Dv], contiguous, is filled.
    """
    if not use_triton(partial):
        merge_splits_reference(partial, mass, out)
        return
    splits, num_rows, heads, width = partial.shape
    if num_rows:
        merge_splits_kernel[(num_rows, heads)](
            partial,
            mass,
            out,
            num_rows,
            heads,
            width,
            splits,
            BLOCK_V=power_of_two(width),
            num_warps=1,
        )


@Kernel
def merge_splits_kernel(
    partial, mass, out, num_rows, heads, value_width, splits, BLOCK_V: tl.constexpr
):
    """One row of one head: its pieces, each already normalised, weighted by exp(log-sum-exp)."""
    line = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    step = tl.full([], 1, tl.int64) * num_rows * heads
    column = tl.arange(0, BLOCK_V)
    inside = column < value_width
    best = tl.full([], float("-inf"), tl.float32)
    for split in range(0, splits):
        best = tl.maximum(best, tl.load(mass + split * step + line))
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([BLOCK_V], tl.float32)
    for split in range(0, splits):
        share = tl.exp(tl.load(mass + split * step + line) - best)
        total += share
        piece = tl.load(partial + (split * step + line) * value_width + column, inside, 0.0)
        mixed += share * piece
    tl.store(out + line * value_width + column, (mixed / total).to(out.dtype.element_ty), inside)
