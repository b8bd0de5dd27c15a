"""Causal attention inside the documents of a packed batch, in Triton: the output with its
log-sum-exp. `document_gradient` has the derivative.

    s = cap(scaling * q . k) over keys of the query's own document, not behind it and less than
    `reach` positions back;  l = log sum e^s;  out = sum e^{s - l} v

`ttt_attention_fused` adds the chain's columns. The definition is `ttt_attention_dense` without a
chain. A program's rows are of one document, so it reads no key of another: what is NaN in one stays
there.

Legend: N tokens, n queries (rows offset .. offset + n - 1), Hq = G * Hkv query heads, D key width,
Dv value width.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .jit import Kernel, interpreting, power_of_two

if TYPE_CHECKING:
    import triton.language as tl


class Reach(NamedTuple):
    """What a query sees, and how scores are made.

    Attributes:
        bounds: document borders, 0 .. N, none empty. scaling: factor of the scores. reach: keys
            this far back or farther are hidden; None = none, and 0 or less hides all. softcap: see
            the module's formula; None = none. offset: row of the first query.
    """

    bounds: tuple[int, ...]
    scaling: float
    reach: int | None
    softcap: float | None
    offset: int = 0


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, reach: Reach, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp.

    Args:
        q: [Hq, n, D], k: [Hkv, N, D], v: [Hkv, N, Dv], unit stride in the last dimension. dtype: of
            the output.
    Returns:
        ([Hq, n, Dv] as rows of an [n, Hq, Dv] buffer, [Hq, n] float32; 0 and -inf where a query
        sees nothing).
    """
    out = torch.empty(q.shape[1], q.shape[0], v.shape[2], dtype=dtype, device=q.device)
    out = out.transpose(0, 1)
    mass = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    rows = reach.offset, reach.offset + q.shape[1]
    launch(causal_forward_kernel, rows, len(q), reach, q, k, v, out, mass)
    return out, mass


@functools.lru_cache(maxsize=16)
def _pieces(
    bounds: tuple[int, ...], begin: int, end: int, block: int, device: torch.device
) -> Tensor:
    """[P, 4] int32: the rows begin .. end - 1 cut into pieces of at most `block` of one document;
    first row and end of a piece, and of its document."""
    pieces = [
        (top, min(top + block, last, end), first, last)
        for first, last in itertools.pairwise(bounds)
        for top in range(max(first, begin), min(last, end), block)
    ]
    return torch.tensor(pieces, dtype=torch.int32, device=device).view(-1, 4)


def launch(
    kernel: Kernel,
    rows: tuple[int, int],
    programs: int,
    reach: Reach,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mass: Tensor,
    *derivative: Tensor,
) -> None:
    """One kernel over the pieces of rows[0] .. rows[1] - 1, `programs` heads of each; `out` is the
    output, or its gradient where a derivative is asked for (delta, then the gradients to fill)."""
    heads, num_queries, width = q.shape
    key_heads, value_width = k.shape[0], v.shape[2]
    wide = max(width, value_width) > 128
    block = 32 if wide and derivative else 64
    pieces = _pieces(reach.bounds, *rows, block, q.device)
    if not len(pieces):
        return
    kernel[(len(pieces), programs)](
        q,
        k,
        v,
        out,
        mass,
        pieces,
        *derivative,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        num_queries,
        k.shape[1],
        reach.offset,
        width,
        value_width,
        reach.scaling,
        reach.reach,
        reach.softcap,
        GROUP=heads // key_heads,
        EXACT=interpreting(),
        BLOCK_M=block,
        BLOCK_N=32 if wide or derivative else 64,
        BLOCK_D=max(16, power_of_two(width)),
        BLOCK_V=max(16, power_of_two(value_width)),
        num_warps=8,
        num_stages=1 if derivative else 2,
    )


@Kernel
def causal_forward_kernel(
    q,
    k,
    v,
    out,
    mass,
    pieces,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    out_head,
    out_row,
    num_queries,
    num_tokens,
    offset,
    width,
    value_width,
    scaling,
    reach,
    softcap,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """At most BLOCK_M queries of one head against the keys of their document. EXACT: see
    `paged_attention`."""
    head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0).to(tl.int64) * 4
    top = tl.load(pieces + piece)
    high = tl.load(pieces + (piece + 1))
    low = tl.load(pieces + (piece + 2))
    query = top + tl.arange(0, BLOCK_M)
    alive = query < high
    row = query.to(tl.int64) - offset
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    asked = tl.load(
        q + head * q_head + row[:, None] * q_row + column[None, :],
        alive[:, None] & (column < width)[None, :],
        0.0,
    ).to(tl.float32)
    if not EXACT:
        asked = asked.to(q.dtype.element_ty)
    if reach is not None:
        low = tl.maximum(low, top - reach + 1)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    k_base = k + (head // GROUP) * k_head
    v_base = v + (head // GROUP) * v_head
    for base in range(low, high, BLOCK_N):
        at = base + tl.arange(0, BLOCK_N)
        exists = at < high
        place = at.to(tl.int64)[:, None]
        key = tl.load(
            k_base + place * k_row + column[None, :],
            exists[:, None] & (column < width)[None, :],
            0.0,
        ).to(tl.float32)
        value = tl.load(
            v_base + place * v_row + value_column[None, :],
            exists[:, None] & (value_column < value_width)[None, :],
            0.0,
        ).to(tl.float32)
        if not EXACT:
            key = key.to(k.dtype.element_ty)
            value = value.to(v.dtype.element_ty)
        score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scaling
        if softcap is not None:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
        seen = (at[None, :] <= query[:, None]) & alive[:, None]
        if reach is not None:
            seen = seen & (query[:, None] - at[None, :] < reach)
        score = tl.where(seen, score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        anchor = tl.where(peak == float("-inf"), 0.0, peak)  # nothing seen yet
        weight = tl.exp(score - anchor[:, None])
        shrink = tl.exp(best - anchor)
        total = total * shrink + tl.sum(weight, 1)
        if not EXACT:
            weight = weight.to(v.dtype.element_ty)
        mixed = mixed * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        best = peak
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(mass + head * num_queries + row, best + tl.log(total), alive)
    tl.store(
        out + head * out_head + row[:, None] * out_row + value_column[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty),
        alive[:, None] & (value_column < value_width)[None, :],
    )
