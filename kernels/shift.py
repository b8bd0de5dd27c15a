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
steps, B sequences of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .jit import Kernel, use_triton

if TYPE_CHECKING:
    import triton.language as tl


def row_ends(starts: Tensor, num_tokens: int | None = None) -> Tensor:
    """The exclusive end of the row that holds each position.

    Args:
        starts: [R+1] int, ascending, starts[0] = 0. num_tokens: starts[-1] where it is known
            without asking the device.
    Returns:
        [N] int64 with N = starts[-1].
    """
    borders = starts.long()
    return torch.repeat_interleave(borders[1:], borders.diff(), output_size=num_tokens)


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
    inside = source < row_ends(starts.to(tokens.device), tokens.shape[0])
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


def shift_insert_reference(
    tokens: Tensor, starts: Tensor, last_rows: Tensor, next_tokens: Tensor
) -> Tensor:
    """The plain definition of `shift_insert`: a shift by one, completed."""
    return insert_next(shift_tokens(tokens, starts, 1), last_rows, next_tokens)


def shift_insert(tokens: Tensor, starts: Tensor, last_rows: Tensor, next_tokens: Tensor) -> Tensor:
    """The head's tokens of a batch that the target has just computed, in one launch.

    Rows behind a sequence's last true row (rejected drafts, which stay in the batch so that its
    shape does not depend on what was kept) take what follows them, and 0 at the sequence's end.

    Args:
        tokens: [N] the target's tokens. starts: [B+1] borders of the sequences, on the device of
            the tokens or the host. last_rows: [B] index of each sequence's last true row.
        next_tokens: [B] the token that follows that row.
    Returns:
        [N], the dtype of `tokens`.
    """
    if not use_triton(tokens):
        out = tokens.roll(-1)  # a third of the definition's small calls
        out[starts[1:].to(out.device) - 1] = 0
        return insert_next(out, last_rows, next_tokens)
    out = torch.empty_like(tokens)
    if last_rows.shape[0]:
        shift_insert_kernel[(last_rows.shape[0],)](
            tokens, starts.to(tokens.device), last_rows, next_tokens, out, BLOCK=256
        )
    return out


@Kernel
def shift_insert_kernel(tokens, starts, last_rows, next_tokens, out, BLOCK: tl.constexpr):
    """One sequence, BLOCK rows at a time."""
    sequence = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(starts + (sequence + 1)).to(tl.int64)
    last = tl.load(last_rows + sequence)
    inserted = tl.load(next_tokens + sequence).to(out.dtype.element_ty)
    for base in range(begin, end, BLOCK):
        row = base + tl.arange(0, BLOCK)
        token = tl.load(tokens + (row + 1), row + 1 < end, 0)
        tl.store(out + row, tl.where(row == last, inserted, token), row < end)
