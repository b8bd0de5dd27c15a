"""The derivative of `document_attention`, from a log-sum-exp that may cover more columns than it.

    With P = e^{s - l} for the l that is given and delta = sum(d_out * out), both of the whole
    softmax:   dV = P^T d_out      dS = P * (d_out V^T - delta) * (1 - (s / softcap)^2)
               dQ = scaling * dS K     dK = scaling * dS^T Q

A key block's gradient is summed by one program over its queries in order: no atomics, and runs
repeat bit for bit.

The definition is the derivative of `ttt_attention_dense` without a chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .document_attention import Reach, launch
from .jit import Kernel

if TYPE_CHECKING:
    import triton.language as tl


def document_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    mass: Tensor,
    delta: Tensor,
    reach: Reach,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of the derivative that these columns have.

    Args:
        q, k, v: as in `document_attention`. grad: [Hq, n, Dv], unit stride in the last dimension.
            mass, delta: [Hq, n] float32, contiguous, of the whole softmax. dtype: of dq.
    Returns:
        (dq [Hq, n, D], dk, dv in the dtypes of k and v).
    """
    grad_q = torch.empty(q.shape, dtype=dtype, device=q.device)
    grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    inputs = reach, q, k, v, grad, mass, delta
    queries = reach.offset, reach.offset + q.shape[1]
    launch(causal_query_kernel, queries, len(q), *inputs, grad_q)
    launch(causal_key_kernel, (0, k.shape[1]), len(k), *inputs, grad_k, grad_v)
    return grad_q, grad_k, grad_v


@Kernel
def causal_query_kernel(
    q,
    k,
    v,
    grad,
    mass,
    pieces,
    delta,
    grad_q,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    grad_head,
    grad_row,
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
    """dQ of at most BLOCK_M queries of one head and document; grad_q is contiguous."""
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
    pull = tl.load(
        grad + head * grad_head + row[:, None] * grad_row + value_column[None, :],
        alive[:, None] & (value_column < value_width)[None, :],
        0.0,
    ).to(tl.float32)
    if not EXACT:
        asked = asked.to(q.dtype.element_ty)
        pull = pull.to(q.dtype.element_ty)
    whole = tl.load(mass + head * num_queries + row, alive, 0.0)
    shift = tl.load(delta + head * num_queries + row, alive, 0.0)
    if reach is not None:
        low = tl.maximum(low, top - reach + 1)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        seen = (at[None, :] <= query[:, None]) & alive[:, None]
        if reach is not None:
            seen = seen & (query[:, None] - at[None, :] < reach)
        weight = tl.exp(tl.where(seen, score - whole[:, None], float("-inf")))
        slope = tl.dot(pull, tl.trans(value), input_precision="ieee") - shift[:, None]
        slope *= weight
        if softcap is not None:
            slope *= 1.0 - (score / softcap) * (score / softcap)
        if not EXACT:
            slope = slope.to(k.dtype.element_ty)
        summed += tl.dot(slope, key, input_precision="ieee")
    tl.store(
        grad_q + (head * num_queries + row)[:, None] * width + column[None, :],
        (summed * scaling).to(grad_q.dtype.element_ty),
        alive[:, None] & (column < width)[None, :],
    )


@Kernel
def causal_key_kernel(
    q,
    k,
    v,
    grad,
    mass,
    pieces,
    delta,
    grad_k,
    grad_v,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    grad_head,
    grad_row,
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
    """dK and dV of at most BLOCK_M keys of one key head and document, over the query heads of its
    group and their queries in order, BLOCK_N at a time; both are contiguous."""
    key_head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0).to(tl.int64) * 4
    top = tl.load(pieces + piece)
    at = top + tl.arange(0, BLOCK_M)
    exists = at < tl.load(pieces + (piece + 1))
    place = at.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    key = tl.load(
        k + key_head * k_head + place[:, None] * k_row + column[None, :],
        exists[:, None] & (column < width)[None, :],
        0.0,
    ).to(tl.float32)
    value = tl.load(
        v + key_head * v_head + place[:, None] * v_row + value_column[None, :],
        exists[:, None] & (value_column < value_width)[None, :],
        0.0,
    ).to(tl.float32)
    if not EXACT:
        key = key.to(k.dtype.element_ty)
        value = value.to(v.dtype.element_ty)
    low = tl.maximum(top, offset)
    high = tl.minimum(tl.load(pieces + (piece + 3)), offset + num_queries)
    if reach is not None:
        high = tl.minimum(high, top + BLOCK_M - 1 + reach)
    summed_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    summed_v = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for member in range(0, GROUP):
        head = key_head * GROUP + member
        for base in range(low, high, BLOCK_N):
            query = base + tl.arange(0, BLOCK_N)
            alive = query < high
            row = query.to(tl.int64) - offset
            asked = tl.load(
                q + head * q_head + row[:, None] * q_row + column[None, :],
                alive[:, None] & (column < width)[None, :],
                0.0,
            ).to(tl.float32)
            pull = tl.load(
                grad + head * grad_head + row[:, None] * grad_row + value_column[None, :],
                alive[:, None] & (value_column < value_width)[None, :],
                0.0,
            ).to(tl.float32)
            if not EXACT:
                asked = asked.to(q.dtype.element_ty)
                pull = pull.to(q.dtype.element_ty)
            whole = tl.load(mass + head * num_queries + row, alive, 0.0)
            shift = tl.load(delta + head * num_queries + row, alive, 0.0)
            score = tl.dot(key, tl.trans(asked), input_precision="ieee") * scaling
            if softcap is not None:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            seen = (at[:, None] <= query[None, :]) & exists[:, None] & alive[None, :]
            if reach is not None:
                seen = seen & (query[None, :] - at[:, None] < reach)
            weight = tl.exp(tl.where(seen, score - whole[None, :], float("-inf")))
            slope = tl.dot(value, tl.trans(pull), input_precision="ieee") - shift[None, :]
            slope = tl.where(seen, slope * weight, 0.0)  # a key that is not seen may hold NaN
            if softcap is not None:
                slope *= 1.0 - (score / softcap) * (score / softcap)
            if not EXACT:
                weight = weight.to(v.dtype.element_ty)
                slope = slope.to(q.dtype.element_ty)
            summed_v += tl.dot(weight, pull, input_precision="ieee")
            summed_k += tl.dot(slope, asked, input_precision="ieee")
    tl.store(
        grad_k + (key_head * num_tokens + place)[:, None] * width + column[None, :],
        (summed_k * scaling).to(grad_k.dtype.element_ty),
        exists[:, None] & (column < width)[None, :],
    )
    tl.store(
        grad_v + (key_head * num_tokens + place)[:, None] * value_width + value_column[None, :],
        summed_v.to(grad_v.dtype.element_ty),
        exists[:, None] & (value_column < value_width)[None, :],
    )
