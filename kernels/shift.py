"""The one place where tokens are shifted against hidden states.

```
position p        0      1      2    ...   n-1
token             x0     x1     x2         x_{n-1}
target state      h0     h1     h2         h_{n-1}
head row p        (h0,x1)(h1,x2)(h2,x3)    (h_{n-1},x_n)
  predicts        x2     x3     x4         x_{n+1}
step k of row p:  token x_{p+1+k}, predicts x_{p+2+k}, teacher softmax(lm_head(norm(h_{p+1+k})))
```
Several rows lie end to end in one packed buffer; `starts` marks their borders (starts[0] = 0,
starts[-1] = N) and nothing is ever shifted across one. Legend: N packed positions, R rows, K unroll
steps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_ends(starts: Tensor) -> Tensor:
    """The exclusive end of the row that holds each position.

    Args:
        starts: [R+1] int, ascending, starts[0] = 0.
    Returns:
        [N] int64 with N = starts[-1].
    """
    borders = starts.long()
    return torch.repeat_interleave(borders[1:], borders.diff())


def shift_tokens(tokens: Tensor, starts: Tensor, offset: int, fill: int = 0) -> Tensor:
    """out[p] = tokens[p + offset] while p + offset lies in p's own row, else `fill`.

    Args:
        tokens: [N] any integer dtype.
        starts: [R+1] row borders.
        offset: how far to look ahead, >= 0 (1 for a head's first step, 1 + k for step k).
    Returns:
        [N], the dtype of `tokens`.
    """
    if offset < 0:
        raise ValueError(f"offset {offset}: a head looks ahead, never back; pass offset >= 0")
    source = torch.arange(tokens.shape[0], device=tokens.device) + offset
    inside = source < row_ends(starts.to(tokens.device))
    picked = tokens[source.clamp(max=max(tokens.shape[0] - 1, 0))]
    return torch.where(inside, picked, torch.full_like(picked, fill))


def supervision(supervised: Tensor, starts: Tensor, steps: int) -> Tensor:
    """Which rows of which step learn: [k, p] is true when x_{p+1} ... x_{p+2+k} were all written by
    the assistant in one turn. Turns are separated by template tokens, so an unbroken run is one
    turn.

    Args:
        supervised: [N] bool, true where the assistant wrote the token.
        starts: [R+1] row borders.
        steps: K >= 1.
    Returns:
        [K, N] bool.
    """
    flags = supervised.to(torch.uint8)
    run = shift_tokens(flags, starts, 1)
    masks = []
    for step in range(steps):
        run = run & shift_tokens(flags, starts, step + 2)
        masks.append(run.bool())
    return torch.stack(masks)


def insert_next(shifted: Tensor, last_rows: Tensor, next_tokens: Tensor) -> Tensor:
    """Complete a shifted buffer: the last row of each sequence takes the token that was just
    decided.

    Args:
        shifted: [N] tokens already shifted by one inside each sequence.
        last_rows: [B] int64, the index of each sequence's last row in this batch.
        next_tokens: [B], the token that follows that row (sampled, or the next prompt token of a
            chunk).
    Returns:
        [N], a new tensor.
    """
    return shifted.index_copy(0, last_rows, next_tokens.to(shifted.dtype))
