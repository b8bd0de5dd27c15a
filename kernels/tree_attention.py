"""Attention of the rows of a drafted tree to everything before the tree and to their own ancestors.

    out_i = sum_j softmax_j(scaling * q_i . k_j) v_j     j before the tree, or on i's path in it

The last C of S keys are the tree's, in the order in which they were written; row i stands at
position S - C + depth(i), not at its key's place. The mask covers those C columns and nothing
before them: a mask over the whole context costs up to half of attention's speed at real lengths.
Soft caps and windows as in `causal_attention`.

Legend: Hq query heads, Hk key heads (Hq = G * Hk), n rows, S keys, C columns of the tree, D key
width, Dv value width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ancestry: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The plain definition, with a materialised mask. See `tree_attention`."""
    group, past = q.shape[0] // k.shape[0], k.shape[1] - ancestry.shape[1]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    above = ancestry.amax(1, keepdim=True) + torch.arange(past, 0, -1, device=q.device)
    up = torch.cat([above, ancestry], 1)
    hidden = up == 0
    if window is not None:
        hidden |= up > window
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return weights @ v.repeat_interleave(group, 0)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ancestry: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See the module's formula.

    Args:
        q: [Hq, n, D]; k: [Hk, S, D]; v: [Hk, S, Dv], any strides.
        ancestry: [n, C] int32, C <= S: how far up the row's path each of the last C keys lies,
            counted from 1 for the row itself; 0 off the path (`tree_build`).
        scaling: factor of the scores. window: a row sees at most this many keys of its path, itself
            included; None = all. softcap: soft cap of the scores; None = none.
    Returns:
        [Hq, n, Dv].
    """
    heads, n, width = q.shape
    key_heads, past = k.shape[0], k.shape[1] - ancestry.shape[1]
    group = heads // key_heads
    assert past >= 0 and heads == group * key_heads
    hidden, first = ancestry == 0, 0
    if window is not None:
        hidden = hidden | (ancestry > window)
        first = max(0, past + 1 - window)  # the first key that a root of the tree sees
    rows = (q * scaling).reshape(key_heads, group * n, width)
    scores = torch.bmm(rows, k[:, first:].transpose(1, 2)).view(key_heads, group, n, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores[..., past - first :].masked_fill_(hidden, float("-inf"))
    if window is not None and window < k.shape[1]:
        # The key d places before the tree lies d above the top of each path.
        above = ancestry.amax(1, keepdim=True) + torch.arange(past - first, 0, -1, device=q.device)
        scores[..., : past - first].masked_fill_(above > window, float("-inf"))
    weights = torch.softmax(scores, -1).view(key_heads, group * n, -1)
    return torch.bmm(weights, v[:, first:]).view(heads, n, -1)
