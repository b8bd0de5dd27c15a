"""Attention of a batch over the pages: decode, chain verification and chunks of a prompt in one
launch.

Sequence b has n_b rows, the last of which stands at position lengths_b - 1; row i sees the keys at
positions 0 .. lengths_b - n_b + i of its own sequence, where position p lies in slot
pages[b, p // page_size] * page_size + p % page_size:

    out_i = sum_j softmax_j(scaling * q_i . k_j) v_j      the causal attention of `causal_attention`

or, where the last slots hold drafted trees, all keys before the tree and its own ancestors in it
(`tree_attention`).

On a GPU the query heads that share a key head are lines of one tile, so a tile reads each key once
for all of them. When a batch has few rows a sequence, the keys are cut at every 1,024th position
and the pieces are merged by their log-sum-exp in order. The cuts lie at fixed positions, so among
batches of equal `most_rows` a sequence's sums do not depend on what runs beside it.

Where the values are the first columns of the keys (attention on latents: DeepSeek's one key head of
576, values of 512, up to 128 query heads) a tile of them is read once for scores and sums alike,
and the columns behind are a second, narrow tile.

Legend: B sequences, N rows in all, Hq = G * Hk query heads, S slots, P pages of the longest, D key
width, Dv value width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .causal_attention import causal_attention_reference
from .jit import Kernel, interpreting, power_of_two, use_triton
from .kv_append import is_prefix
from .merge_splits import merge_splits
from .paged_rows import PagedRows
from .tree_attention import tree_attention_reference

if TYPE_CHECKING:
    import triton.language as tl

_SPAN = 1024  # keys of one piece
_FEW = 16  # rows of a sequence up to which its keys are cut into pieces


def paged_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The plain definition: gather a sequence's keys, attend, next sequence. See
    `paged_attention`."""
    parts = []
    borders = rows.starts.tolist()
    for index, length in enumerate(rows.lengths.tolist()):
        first, end = borders[index], borders[index + 1]
        if first == end:
            continue
        position = torch.arange(length, device=q.device)
        page = rows.pages[index, position // rows.page_size].long()
        slots = page * rows.page_size + position % rows.page_size
        seen = q[:, first:end], keys[:, slots], values[:, slots]
        if rows.tree is None:
            part = causal_attention_reference(*seen, scaling, window, softcap)
        else:
            ancestry = rows.tree.ancestry[first:end, : int(rows.tree.columns[index])]
            part = tree_attention_reference(*seen, ancestry, scaling, window, softcap)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts) if parts else q.new_empty(0, q.shape[0], values.shape[2])


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See the module's formula; carries no gradient.

    Args:
        q: [Hq, N, D], any strides. keys: [Hk, S, D], values: [Hk, S, Dv]: a layer of the pool, unit
            stride in the last dimension; slots that no sequence sees are not read. values may be a
            view of the keys.
        rows: the batch. scaling: factor of the scores. window: a row sees at most this many keys,
            itself included; None = all. softcap: soft cap of the scores; None = none.
    Returns:
        [N, Hq, Dv].
    """
    if not use_triton(q):
        return paged_attention_reference(
            q, keys, values, rows, scaling=scaling, window=window, softcap=softcap
        )
    heads, num_rows, width = q.shape
    key_heads, value_width = keys.shape[0], values.shape[2]
    group, batch = heads // key_heads, rows.lengths.shape[0]
    assert heads == group * key_heads
    q = q if q.stride(-1) == 1 else q.contiguous()
    pages = rows.pages.contiguous()
    tree = rows.tree
    splits = -(-rows.longest // _SPAN) if rows.most_rows <= _FEW else 1
    out = torch.empty(num_rows, heads, value_width, dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    partial, mass = out, None
    if splits > 1:
        partial = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
        mass = torch.empty(splits, num_rows, heads, dtype=torch.float32, device=q.device)
    lines = rows.most_rows * group
    inside = is_prefix(values, keys)
    wide = max(width, value_width) > 128
    tall = 64 if value_width <= 256 else 32  # else the sums alone fill the registers
    block_m = max(16, min(tall, power_of_two(lines)))
    paged_attention_kernel[(-(-lines // block_m), batch, key_heads * splits)](
        q,
        keys,
        values,
        rows.starts,
        rows.lengths,
        pages,
        None if tree is None else tree.ancestry.contiguous(),
        None if tree is None else tree.columns,
        None if tree is None else tree.positions.contiguous(),
        partial,
        mass,
        q.stride(0),
        q.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        num_rows,
        heads,
        width,
        value_width,
        pages.shape[1],
        0 if tree is None else tree.ancestry.shape[1],
        rows.page_size,
        scaling,
        window,
        softcap,
        _SPAN if splits > 1 else None,
        INSIDE=inside,
        GROUP=group,
        SPLITS=splits,
        EXACT=interpreting(),
        BLOCK_M=block_m,
        BLOCK_N=32 if wide else 64,
        BLOCK_D=max(16, power_of_two(width - value_width * inside)),
        BLOCK_V=max(16, power_of_two(value_width)),
        num_warps=8 if block_m == tall else 4,
        num_stages=2,
    )
    if mass is not None:
        merge_splits(partial, mass, out)
    return out


@Kernel
def paged_attention_kernel(
    q,
    keys,
    values,
    starts,
    lengths,
    pages,
    ancestry,
    columns,
    positions,
    out,
    mass,
    q_head,
    q_row,
    keys_head,
    keys_slot,
    values_head,
    values_slot,
    num_rows,
    heads,
    width,
    value_width,
    num_pages,
    num_columns,
    page_size,
    scaling,
    window,
    softcap,
    span,
    INSIDE: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_M lines (row, head of the group) of one sequence against one piece of its keys.

    EXACT multiplies in float32 (the interpreter knows no bfloat16); else the products run in the
    tensors' dtype and add in float32. INSIDE: the values are the keys' first columns.
    """
    sequence = tl.program_id(1).to(tl.int64)
    key_head = (tl.program_id(2) // SPLITS).to(tl.int64)
    split = tl.program_id(2) % SPLITS
    begin = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + (sequence + 1)) - begin).to(tl.int32)
    length = tl.load(lengths + sequence).to(tl.int32)
    top = tl.program_id(0) * BLOCK_M
    if top >= count * GROUP:
        return
    line = top + tl.arange(0, BLOCK_M)
    alive = line < count * GROUP
    row = begin + line // GROUP
    head = key_head * GROUP + line % GROUP
    position = length - count + line // GROUP
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    if INSIDE:
        front = tl.load(
            q + head[:, None] * q_head + row[:, None] * q_row + value_column[None, :],
            alive[:, None] & (value_column < value_width)[None, :],
            0.0,
        ).to(tl.float32)
        if not EXACT:
            front = front.to(q.dtype.element_ty)
        column += value_width
    query = tl.load(
        q + head[:, None] * q_head + row[:, None] * q_row + column[None, :],
        alive[:, None] & (column < width)[None, :],
        0.0,
    ).to(tl.float32)
    if not EXACT:
        query = query.to(q.dtype.element_ty)
    # Keys that some line of this tile sees, and of them this piece.
    low = 0
    if window is not None:
        low = tl.maximum(length - count + top // GROUP - window + 1, 0)
    high = length - count + tl.minimum(count, (top + BLOCK_M - 1) // GROUP + 1)
    text = length  # where a tree begins
    if ancestry is not None:
        text = length - tl.load(columns + sequence).to(tl.int32)
        position = tl.load(positions + row, alive, 0).to(tl.int32)
        high = length
        if window is not None:
            low = tl.maximum(text - window + 1, 0)
    if span is not None:
        low = tl.maximum(low, split * span)
        high = tl.minimum(high, split * span + span)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for base in range(low, high, BLOCK_N):
        at = base + tl.arange(0, BLOCK_N)
        exists = at < high
        page = tl.load(pages + sequence * num_pages + at // page_size, exists, 0).to(tl.int64)
        slot = page * page_size + at % page_size
        key = tl.load(
            keys + key_head * keys_head + slot[:, None] * keys_slot + column[None, :],
            exists[:, None] & (column < width)[None, :],
            0.0,
        ).to(tl.float32)
        if not EXACT:
            key = key.to(keys.dtype.element_ty)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if INSIDE:
            value = tl.load(
                keys + key_head * keys_head + slot[:, None] * keys_slot + value_column[None, :],
                exists[:, None] & (value_column < value_width)[None, :],
                0.0,
            ).to(tl.float32)
            if not EXACT:
                value = value.to(keys.dtype.element_ty)
            score = tl.dot(front, tl.trans(value), score, input_precision="ieee")
        score = score * scaling
        if softcap is not None:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
        if ancestry is not None:
            up = tl.load(
                ancestry + row[:, None] * num_columns + (at - text)[None, :],
                alive[:, None] & (exists & (at >= text))[None, :],
                0,
            )
            seen = exists[None, :] & ((at < text)[None, :] | (up > 0))
            if window is not None:
                seen = seen & (up <= window)
                seen = seen & ((at >= text)[None, :] | (at[None, :] > position[:, None] - window))
        else:
            seen = exists[None, :] & (at[None, :] <= position[:, None])
            if window is not None:
                seen = seen & (at[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        anchor = tl.where(peak == float("-inf"), 0.0, peak)  # a line that has seen no key yet
        weight = tl.exp(score - anchor[:, None])
        shrink = tl.exp(best - anchor)
        total = total * shrink + tl.sum(weight, 1)
        if not INSIDE:
            value = tl.load(
                values
                + key_head * values_head
                + slot[:, None] * values_slot
                + value_column[None, :],
                exists[:, None] & (value_column < value_width)[None, :],
                0.0,
            ).to(tl.float32)
            if not EXACT:
                value = value.to(values.dtype.element_ty)
        if not EXACT:
            weight = weight.to(values.dtype.element_ty)
        mixed = mixed * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        best = peak
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = row * heads + head
    if mass is not None:
        place += split.to(tl.int64) * num_rows * heads
        logsum = best + tl.log(tl.where(total == 0.0, 1.0, total))  # -inf where nothing was seen
        tl.store(mass + place, logsum, alive)
    tl.store(
        out + place[:, None] * value_width + value_column[None, :],
        result.to(out.dtype.element_ty),
        alive[:, None] & (value_column < value_width)[None, :],
    )
