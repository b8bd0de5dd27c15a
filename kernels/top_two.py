"""What a greedy choice needs of a row of logits, read once: the best, where it is, and the next
best.

    best_n = max_i x_ni        place_n = the first i that has it        next_n = max of the others
"""

from __future__ import annotations

import torch
from torch import Tensor

from .native import INTEGER, POINTER, SMALL, TYPES, Native

_NATIVE = Native(
    "top_two", {"top_two": [SMALL, POINTER, INTEGER, *[POINTER] * 3, INTEGER, INTEGER]}
)


def top_two_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The plain definition, see `top_two`."""
    best, place = x.max(-1)
    rest = x.scatter(1, place[:, None], float("-inf")).amax(-1)
    return best, place, rest


def top_two(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See the module's formulas.

    Args:
        x: [N, V], V >= 2.
    Returns:
        (best [N], place [N] int64, next [N]) in x's dtype; best is NaN where any value of the row
        is, and then the others say nothing.
    """
    if not _NATIVE.serves(x):
        return top_two_reference(x)
    x = x if x.stride(1) == 1 else x.contiguous()
    best, following = x.new_empty(2, x.shape[0])
    place = torch.empty(x.shape[0], dtype=torch.int64)
    pointers = [one.data_ptr() for one in (best, place, following)]
    _NATIVE.functions.top_two(TYPES[x.dtype], x.data_ptr(), x.stride(0), *pointers, *x.shape)
    return best, place, following
