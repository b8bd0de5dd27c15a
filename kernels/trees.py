"""Drafted trees of a batch, as acceptance reads them (`accept_tree`).

Legend: B trees, C the most rows of any, row 0 of a tree is its root, N rows in all, V vocabulary,
Vd draft vocabulary, R rows that children were drawn at.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Trees:
    """What was drafted for a batch; all tensors on one device.

    Attributes:
        tokens: [B, C] int64, the token of each row; the root's is not read. starts: [B+1] int64
            borders of the trees' rows among the N.
        first_child, next_sibling: [B, C] int64, rows of the same tree, -1 for none.
        greedy: [B] bool. drawn: [B] bool, false where the children were chosen (one-hot law).
        uniforms: [B, C] float64 in [0, 1): the j-th tries row j + 1, the last of a tree's rows
            draws the token that follows.
        height: at least the nodes of the longest path; sets the width of the result.
        law: [R, Vd] what children were drawn from, before the first was, or None when none was
            drawn. law_rows: [B, C] int64, where in `law` the children of a row find theirs, -1 for
            none.
        columns: [V] int64, the column of `law` that holds a token, -1 for none, ascending; None
            when Vd = V.
    """

    tokens: Tensor
    starts: Tensor
    first_child: Tensor
    next_sibling: Tensor
    greedy: Tensor
    drawn: Tensor
    uniforms: Tensor
    height: int
    law: Tensor | None = None
    law_rows: Tensor | None = None
    columns: Tensor | None = None
