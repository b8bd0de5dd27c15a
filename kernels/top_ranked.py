"""The likeliest tokens of a row of logits and their log-probabilities, the row read once.

    places_n = the `count` largest of x_n, the largest first and of equals the earlier one
    chances_n = x_n[places_n] - log sum_i exp(x_ni), at most 0

What a level of a drafted tree is grown from (EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .native import INTEGER, POINTER, SMALL, TYPES, Native

_NATIVE = Native(
    "top_ranked", {"top_ranked": [SMALL, POINTER, INTEGER, POINTER, POINTER, *[INTEGER] * 3]}
)


def top_ranked_reference(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The plain definition, see `top_ranked`; which of equals are taken is open."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    best = x.topk(count, -1)
    return (best.values - x.logsumexp(-1, keepdim=True)).clamp_(max=0), best.indices


def top_ranked(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See the module's formulas.

    Args:
        x: [N, V] logits. count: how many of a row, 1 to V.
    Returns:
        (chances [N, count] in at least float32, places [N, count] int64); a row that holds a NaN
        has no other chances.
    """
    assert 1 <= count <= x.shape[1]
    if not _NATIVE.serves(x):
        return top_ranked_reference(x, count)
    x = x if x.stride(1) == 1 else x.contiguous()
    wide = torch.promote_types(x.dtype, torch.float32)
    chances = torch.empty(x.shape[0], count, dtype=wide)
    places = torch.empty(x.shape[0], count, dtype=torch.int64)
    _NATIVE.functions.top_ranked(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        chances.data_ptr(),
        places.data_ptr(),
        *x.shape,
        count,
    )
    return chances, places
