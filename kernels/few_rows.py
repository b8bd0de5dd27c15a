"""Attention of a few rows a sequence over the pages, on a CPU: the decode and verify rows of a
whole batch in one call.

The function is that of `causal_attention` for every sequence, or of `tree_attention` where its last
keys are a drafted tree, read through its page table as in `paged_attention`; scores, softmax and
sums are float32 (float64 for float64 tensors) and rounded once. A loop over the sequences in Python
costs more than the arithmetic. Sequences of more than `MOST` rows are left to matrix products.
There is no plain form: the definition is `paged_attention_reference`, and a machine without a
compiler loops.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from .native import POINTER, SMALL, TYPES, Native
from .paged_rows import PagedRows

MOST = 64
"""Rows of a sequence that one call takes: up to so many it beats matrix products, or equals them in
a long context."""


class Shape(ctypes.Structure):
    """`Shape` in few_rows.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "pages")),
        *((name, ctypes.c_int64) for name in ("batch", "table", "page_size")),
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "width", "value_width")),
        *((name, ctypes.c_int64) for name in ("q_head", "q_row", "keys_head", "keys_slot")),
        *((name, ctypes.c_int64) for name in ("values_head", "values_slot")),
        *((name, ctypes.c_double) for name in ("scaling", "softcap")),
        *((name, ctypes.c_int64) for name in ("window", "most")),
        *((name, ctypes.c_void_p) for name in ("ancestry", "columns")),
        ("tree_table", ctypes.c_int64),
    ]


_NATIVE = Native("few_rows", {"attend": [SMALL, POINTER, POINTER, POINTER, POINTER, POINTER]})


def serves(like: Tensor) -> bool:
    """Whether `few_rows_attention` can be called with tensors like this one."""
    return _NATIVE.serves(like)


def few_rows_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of all sequences with at most `MOST` rows.

    Args:
        q: [Hq, N, D], keys: [Hk, S, D], values: [Hk, S, Dv], one dtype, unit stride in the last
            dimension. rows: the batch, on the CPU. scaling, window, softcap: see
            `causal_attention`.
    Returns:
        [N, Hq, Dv]; the rows of longer sequences are not written.
    """
    assert q.dtype == keys.dtype == values.dtype
    assert q.stride(2) == keys.stride(2) == values.stride(2) == 1
    heads, num_rows, _ = q.shape
    out = q.new_empty(num_rows, heads, values.shape[2])
    strides = q.stride(0), q.stride(1)
    shape = shape_of(rows, heads, keys, values, strides, scaling, window, softcap)
    _NATIVE.functions.attend(
        TYPES[q.dtype],
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        ctypes.addressof(shape),
    )
    return out


def shape_of(
    rows: PagedRows,
    heads: int,
    keys: Tensor,
    values: Tensor,
    q_strides: tuple[int, int],
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Shape:
    """A call as C++ reads it: `heads` query heads whose strides by head and row are given; the rest
    see `few_rows_attention`."""
    tree = rows.tree
    assert tree is None or (tree.ancestry.is_contiguous() and tree.columns.is_contiguous())
    return Shape(
        rows.starts.data_ptr(),
        rows.lengths.data_ptr(),
        rows.pages.data_ptr(),
        *rows.pages.shape,
        rows.page_size,
        heads,
        keys.shape[0],
        keys.shape[2],
        values.shape[2],
        *q_strides,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        scaling,
        softcap or 0.0,
        window or 0,
        MOST,
        None if tree is None else tree.ancestry.data_ptr(),
        None if tree is None else tree.columns.data_ptr(),
        0 if tree is None else tree.ancestry.shape[1],
    )
