"""An unroll whose activations are alive for one chunk of rows at a time.

```
rows        | chunk 0 | chunk 1 | chunk 2 | ...      all K steps of a chunk, then the next chunk
step-0 keys  kept      kept      kept                of the document that is still open
```
A row needs of the rows before it their step-0 keys alone, so chunks are run in order, as a long
prompt is prefilled, and each is run again in the backward pass. What stays alive for every row are
step-0 keys and values with their gradients, and what the head drafted; everything between is that
of one chunk.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..data.batches import PackedBatch
from ..kernels.shift import shift_tokens
from ..kernels.ttt_attention import ttt_attention
from ..models.heads import Head
from ..models.trunk import Trunk
from .unroll import UnrollContext, check_steps

Written = dict[int, tuple[Tensor, Tensor]]  # keys and values of each layer's first step


class _Chunk(NamedTuple):
    """Rows [begin, end); the document of the first one begins at `start`."""

    start: int
    begin: int
    end: int


def unroll_in_chunks(
    head: Head,
    trunk: Trunk,
    batch: PackedBatch,
    steps: int,
    *,
    states: dict[int, Tensor] | None = None,
    noise: Tensor | None = None,
    rows: int,
) -> Tensor:
    """What `unroll.unroll` gives, [K, N, H], `rows` rows at a time; each chunk is run again in the
    backward pass."""
    check_steps(head, steps)
    dtype = next(head.parameters()).dtype
    states = {0: batch.hidden} if states is None else states
    tokens = [shift_tokens(batch.tokens, batch.starts, 1 + step) for step in range(steps)]
    starts = batch.starts.tolist()

    def run(chunk: _Chunk, past: list[tuple[int, Written]]) -> tuple[Tensor, Written]:
        place = slice(chunk.begin, chunk.end)
        context = ChunkContext(starts, chunk, past)
        hidden = head.feed({k: state[place] for k, state in states.items()}, trunk).to(dtype)
        if noise is not None:
            hidden = hidden + noise[place].to(dtype)
        drafted = []
        for step in range(steps):
            context.step = step
            embeds = trunk.embed(tokens[step][place]).to(dtype)
            out = head(embeds, hidden, batch.positions[place] + step, context, step)
            hidden = out.recycled
            drafted.append(out.drafted)
        return torch.stack(drafted), context.written

    drafted: list[Tensor] = []
    past: list[tuple[int, Written]] = []  # with the number of the first row
    for begin in range(0, starts[-1], rows):
        start = max(border for border in starts if border <= begin)
        chunk = _Chunk(start, begin, min(begin + rows, starts[-1]))
        past = [(first, written) for first, written in past if first + rows > start]
        # A head draws no random numbers, so none need be drawn again.
        out, written = checkpoint(run, chunk, past, use_reentrant=False, preserve_rng_state=False)
        drafted.append(out)
        past = [*past, (begin, written)]
    return torch.cat(drafted, 1)


class ChunkContext(UnrollContext):
    """What the rows of a chunk may see: step-0 keys of their own documents, also those that earlier
    chunks wrote, and their own chains.

    Args:
        starts: borders of the batch's documents. chunk: which rows. past: first row and keys of the
            earlier chunks that reach into the chunk's first document, in order.
    """

    def __init__(self, starts: list[int], chunk: _Chunk, past: list[tuple[int, Written]]) -> None:
        start, begin, end = chunk
        inside = [border - start for border in starts if start < border < end]
        attention = partial(ttt_attention, offset=begin - start)
        super().__init__([0, *inside, end - start], attention)
        self.past = [(max(0, start - first), written) for first, written in past]
        self.written: Written = {}

    def commit(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the open document's earlier rows before the chunk's own."""
        # Many chunks add to the gradient of these, which would be rounded as often.
        accurate = torch.promote_types(key.dtype, torch.float32)
        self.written[layer] = key.to(accurate), value.to(accurate)
        parts = [[x[:, skip:].to(key.dtype) for x in w[layer]] for skip, w in self.past]
        keys, values = zip(*parts, (key, value), strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)
