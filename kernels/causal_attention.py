"""Causal attention of n queries to the last n of S keys and to all keys before them.

    out_i = sum_{j <= S - n + i} softmax_j(scaling * q_i . k_j) v_j
    with a soft cap c, scores become c * tanh(score / c)

This one function serves a packed prefill (n = S), a chunk with a past (n < S), a decode row (n = 1)
and the rows of a chain to verify (n = K + 1): what is dumped, trained on and decoded sees the same
attention. Few queries go to PyTorch's fused attention with a mask on the last n columns only; many
in bfloat16 on a CPU with matrix tiles to a C++ form, whose scores stay in float32, a whole batch of
documents in one call. Elsewhere many go in blocks of queries against exactly the keys they may see,
which without matrix units is twice as fast as the fused form in bfloat16; in that dtype the scores
of a block are rounded to bfloat16 before the float32 softmax, as in transformers' eager attention.

Legend: Hq query heads, Hk key heads (Hq = G * Hk), n queries, S keys, D key width, Dv value width.
"""

from __future__ import annotations

import ctypes
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from .native import POINTER, Native

_BLOCK = 128
_FEW = 16
_DEPTH = 32  # the C++ form takes widths that are a multiple of it
_NATIVE = Native("causal_attention", {"usable": [], "attend": [POINTER]}, returns=("usable",))


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "borders")),
        *((name, ctypes.c_int64) for name in ("documents", "past", "heads", "key_heads")),
        *((name, ctypes.c_int64) for name in ("width", "value_width")),
        *((name, ctypes.c_int64) for name in ("q_head", "q_row", "k_head", "k_row")),
        *((name, ctypes.c_int64) for name in ("v_head", "v_row", "window")),
        ("scaling", ctypes.c_double),
    ]


def causal_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The plain definition, with a materialised mask. q [Hq,n,D], k [Hk,S,D], v [Hk,S,Dv] ->
    [Hq,n,Dv]."""
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + _mask(q.shape[1], k.shape[1], window, scores)
    return torch.softmax(scores, -1) @ v.repeat_interleave(group, 0)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention, aligned at the end.

    Args:
        q: [Hq, n, D]; k: [Hk, S, D]; v: [Hk, S, Dv], S >= n, any strides.
        scaling: factor of the scores.
        window: a query sees at most this many keys, itself included (sliding window); None = all.
        softcap: soft cap of the scores; None = none.
    Returns:
        [Hq, n, Dv].
    """
    heads, n, width = q.shape
    group, past = heads // k.shape[0], k.shape[1] - n
    assert past >= 0 and heads == group * k.shape[0]
    if n <= _FEW and softcap is None:
        rows = q.reshape(1, k.shape[0], group * n, width)
        mask = None
        if n > 1 or (window is not None and window <= past):
            mask = _mask(n, past + n, window, q).repeat(group, 1)
        out = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask, scale=scaling)
        return out.view(heads, n, -1)
    if softcap is None and _tiled(q, k, v):
        return _native(q, k, v, [0, n], scaling, window).transpose(0, 1)
    scaled = (q * scaling).view(k.shape[0], group, n, width)
    out = q.new_empty(k.shape[0], group, n, v.shape[-1])
    for start in range(0, n, _BLOCK):
        end = min(n, start + _BLOCK)
        rows, seen = end - start, past + end
        first = 0 if window is None else max(0, past + start - window + 1)
        block = scaled[:, :, start:end].reshape(k.shape[0], group * rows, width)
        scores = torch.bmm(block, k[:, first:seen].transpose(1, 2)).view(
            k.shape[0], group, rows, -1
        )
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is None:
            scores[..., -rows:] += _mask(rows, rows, None, scores)
        else:
            scores += _mask(rows, seen - first, window, scores)
        weights = torch.softmax(scores, -1).view(k.shape[0], group * rows, -1)
        mixed = torch.bmm(weights, v[:, first:seen])
        out[:, :, start:end] = mixed.view(k.shape[0], group, rows, -1)
    return out.view(heads, n, -1)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: list[int],
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`causal_attention` of documents that lie end to end, each within itself.

    Args:
        q: [Hq, N, D]; k: [Hk, N, D]; v: [Hk, N, Dv], any strides.
        borders: where documents begin and end: 0, ..., N, none empty.
        scaling, window, softcap: see `causal_attention`.
    Returns:
        [N, Hq, Dv].
    """
    if softcap is None and _tiled(q, k, v):
        return _native(q, k, v, borders, scaling, window)
    parts = [
        causal_attention(q[:, a:b], k[:, a:b], v[:, a:b], scaling, window, softcap).transpose(0, 1)
        for a, b in itertools.pairwise(borders)
    ]
    return torch.cat(parts)


def _tiled(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the C++ form takes these."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in (q, k, v)):
        return False  # it has no derivative
    return (
        q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.shape[-1] % _DEPTH == v.shape[-1] % _DEPTH == 0
        and _NATIVE.serves(q)
        and bool(_NATIVE.functions.usable())
    )


def _native(
    q: Tensor, k: Tensor, v: Tensor, borders: list[int], scaling: float, window: int | None
) -> Tensor:
    """[N, Hq, Dv]; see `packed_attention`. One document may have a past."""
    q, k, v = (one if one.stride(2) == 1 else one.contiguous() for one in (q, k, v))
    (heads, rows, width), value_width = q.shape, v.shape[2]
    places = (ctypes.c_int64 * len(borders))(*borders)
    out = q.new_empty(rows, heads, value_width)
    call = _Call(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        ctypes.addressof(places),
        len(borders) - 1,
        k.shape[1] - rows,
        heads,
        k.shape[0],
        width,
        value_width,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        window or 0,
        scaling,
    )
    _NATIVE.functions.attend(ctypes.addressof(call))
    return out


def _mask(n: int, keys: int, window: int | None, like: Tensor) -> Tensor:
    """[n, keys] of 0 where query i (the keys' last n) may look and -inf elsewhere."""
    query = torch.arange(keys - n, keys, device=like.device)[:, None]
    key = torch.arange(keys, device=like.device)[None]
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    return torch.zeros(n, keys, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, float("-inf")
    )
