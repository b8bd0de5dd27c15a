"""The share that one of several ranks has in a packed batch: two pieces of its rows.

```
rows of the batch   |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |     2S pieces, S = 4
rank                   0     1     2     3     3     2     1     0
```
A causal query costs more the later it stands, so a rank has piece r and piece 2S-1-r: all have as
many rows, and nearly as much attention. A piece is followed by the first rows of the next one, its
halo: row p learns from tokens and states up to p + 1 + K. Halo rows are computed and learn nothing
here; they are rows of the rank that owns them.

A batch is filled up to a multiple of 2S rows with a document of its own, in which nothing is
supervised, so that every piece is as long as every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import PackedBatch


class Piece(NamedTuple):
    """Rows of a whole batch: [begin, end) are the rank's own, [end, stop) the halo."""

    begin: int
    end: int
    stop: int


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchSlice(PackedBatch):
    """The rows of some pieces, halos included, as a packed batch: every tensor has these rows
    alone, and `starts` cuts documents where pieces begin and end.

    Attributes:
        pieces: the rows, ascending. borders: those of the documents of the whole filled batch.
        own: [n] bool, false in halos. own_tokens: own rows without the filling.
    """

    pieces: tuple[Piece, ...]
    borders: tuple[int, ...]
    own: Tensor
    own_tokens: int

    @property
    def num_tokens(self) -> int:
        """See `PackedBatch`."""
        return self.own_tokens

    def chains(self, steps: int) -> Tensor:
        """See `PackedBatch`."""
        return super().chains(steps) & self.own


def slice_batch(batch: PackedBatch, index: int, size: int, steps: int) -> BatchSlice:
    """What rank `index` of `size` ranks trains of a batch, unrolled for up to `steps` steps K.

    hidden is copied, so that the whole batch's need not stay in memory.
    """
    total = batch.tokens.numel()
    length = -(-total // (2 * size))
    filled = 2 * size * length
    pieces = tuple(
        Piece(end - length, end, min(end + steps + 1, filled))
        for end in ((index + 1) * length, filled - index * length)
    )
    borders = (*batch.starts.tolist(), *([filled] if filled > total else []))
    starts, own = [0], []
    for begin, end, stop in pieces:
        inside = [b for b in borders if begin < b < stop]
        starts += [starts[-1] + b - begin for b in (*inside, stop)]
        own.append(torch.arange(begin, stop) < end)

    def cut(whole: Tensor) -> Tensor:
        parts = []
        for begin, _, stop in pieces:
            part = whole[begin:stop]
            filling = whole.new_zeros(stop - begin - len(part), *whole.shape[1:])
            parts += [part, filling]
        return torch.cat(parts)

    positions = F.pad(batch.positions, (0, filled - total))
    positions[total:] = torch.arange(filled - total)
    device = batch.tokens.device
    return BatchSlice(
        cut(batch.tokens),
        cut(batch.supervised),
        cut(batch.hidden),
        torch.tensor(starts, dtype=torch.int32, device=batch.starts.device),
        cut(positions),
        batch.row_ids,
        batch.index,
        pieces=pieces,
        borders=borders,
        own=torch.cat(own).to(device),
        own_tokens=sum(max(0, min(end, total) - begin) for begin, end, _ in pieces),
    )
