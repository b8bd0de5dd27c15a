"""Backward of causal attention over packed documents on a CPU with matrix tiles (AMX), bfloat16.

    P_ij = exp(scaling * q_i . k_j - L_i)            L_i: log-sum-exp of all that query i sees
    dV = P^T dO      dS = P * (dO V^T - drop)        drop_i = sum_d dO_id out_id
    dK = scaling dS^T Q        dQ = scaling dS K

as in Dao, arXiv 2307.08691, algorithm 2, which PyTorch's CPU form computes without the tiles. P and
dS are rounded to bfloat16 where they meet the next product, sums are float32. There is no plain
form: where this does not serve, PyTorch's own backward runs (`ttt_attention_flash`).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .native import POINTER, Native

_POINTERS = ("q", "k", "v", "grad", "mass", "drop", "dq", "dk", "dv", "bounds")
_SIZES = ("documents", "heads", "groups", "tokens", "width")
_STRIDES = tuple(f"{one}_{what}" for one in "qkvg" for what in ("head", "row"))


class _Call(ctypes.Structure):
    """`Call` in tiled_pull.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_STRIDES)),
        ("scaling", ctypes.c_float),
    ]


_NATIVE = Native("tiled_pull", {"tiled": [], "pull": [POINTER]}, returns=("tiled",))


def serves(q: Tensor) -> bool:
    """Whether `tiled_pull` takes queries like these [Hq, N, D], and values of the same width."""
    if q.dtype != torch.bfloat16 or q.shape[-1] % 32 or q.shape[-1] > 128:
        return False
    if not _NATIVE.serves(q):
        return False
    return bool(_NATIVE.functions.tiled())


def tiled_pull(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    mass: Tensor,
    drop: Tensor,
    bounds: tuple[int, ...],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        q, grad: [Hq, N, D]; k, v: [Hkv, N, D], bfloat16. mass, drop: [Hq, N] float32, see the
            module. bounds: document borders, 0 .. N.
    Returns:
        bfloat16, the shapes of q, k and v, contiguous.
    """
    (heads, tokens, width), key_heads = q.shape, k.shape[0]
    rows = [x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v, grad)]
    sums = [x.float().contiguous() for x in (mass, drop)]
    borders = torch.tensor(bounds, dtype=torch.int64)
    dq = torch.empty(q.shape, dtype=q.dtype)
    parts = torch.empty(2, heads, tokens, width)
    call = _Call(
        *(x.data_ptr() for x in (*rows, *sums, dq, parts[0], parts[1], borders)),
        len(bounds) - 1,
        heads,
        heads // key_heads,
        tokens,
        width,
        *(stride for x in rows for stride in (x.stride(0), x.stride(1))),
        scaling,
    )
    _NATIVE.functions.pull(ctypes.byref(call))
    dk, dv = parts.unflatten(1, (key_heads, -1)).sum(2).to(q.dtype)
    return dq, dk, dv
