"""A batch: the rows of several sequences end to end, with where each is written and what it may
see."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..kernels import few_rows
from ..kernels.causal_attention import causal_attention
from ..kernels.decoder_pass import PagedLayers
from ..kernels.jit import use_triton
from ..kernels.kv_append import is_prefix, kv_append
from ..kernels.paged_attention import paged_attention
from ..kernels.paged_rows import DraftedRows, PagedRows
from ..kernels.tree_attention import tree_attention
from ..kernels.tree_build import ABSENT, TreeTables, build_trees
from ..models.attention import OverPages
from .pages import KVPool
from .sequence import Sequence
from .tree import depths_of
from .upload import upload


@dataclass(frozen=True)
class Batch:
    """N rows of B sequences.

    Attributes:
        sequences: the B sequences in order. starts: [B+1] borders of their rows.
        tokens: [N] int64. positions: [N] int64, also the RoPE phase.
        slots: [N] pool slots that the rows' keys and values go to.
        lengths: [B] how many slots of each sequence hold keys once these rows are written; what the
            last row sees, but for trees.
        trees: None where every row sees all before it.
    """

    sequences: list[Sequence]
    starts: list[int]
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: list[int]
    trees: BatchTrees | None = None

    @classmethod
    def build(
        cls,
        parts: list[tuple[Sequence, int, list[int]]],
        device: torch.device | str = "cpu",
        parents: list[list[int]] | None = None,
    ) -> Batch:
        """Pack (sequence, first slot, tokens) parts.

        Without `parents` the row of slot p stands at position p and sees all before it. With them,
        parents[b] are those of the tree in the sequence's last slots, of which the last ones are
        this batch's rows (slots before them were written by passes before): entry j < its own
        index, -1 for what follows the text before the tree. A row stands at its depth behind that
        text and sees it, and its own ancestors.
        """
        starts, tokens, positions, slots, lengths = [0], [], [], [], []
        for index, (sequence, first, ids) in enumerate(parts):
            assert ids, "a sequence without rows does not belong into a batch"
            tokens += ids
            span = range(first, first + len(ids))
            if parents is None:
                positions += span
            else:
                text = span.stop - len(parents[index]) - 1
                depths = depths_of(parents[index])[-len(ids) :]
                positions += [text + depth for depth in depths]
            slots += [sequence.slot(place) for place in span]
            starts.append(len(tokens))
            lengths.append(span.stop)
        buffer = upload([tokens, positions, slots], device, torch.int64)
        trees = None if parents is None else BatchTrees.build(parents, buffer.device)
        sequences = [part[0] for part in parts]
        return cls(sequences, starts, buffer[0], buffer[1], buffer[2], lengths, trees)

    def keep(self, paths: list[list[int]]) -> tuple[Batch, Tensor]:
        """The rows that became text: of each sequence the rows `paths`, ascending and the first
        among them, at the slots and positions where they belong now; and their indices [N']."""
        rows, places, starts, lengths = [], [], [0], []
        for index, path in enumerate(paths):
            first, size = self.starts[index], self.starts[index + 1] - self.starts[index]
            assert path and path[0] == 0 and path[-1] < size
            rows += [first + row for row in path]
            places += range(first, first + len(path))
            starts.append(len(rows))
            lengths.append(self.lengths[index] - size + len(path))
        both = upload([rows, places], self.tokens.device)
        chosen, slots = both[0], self.slots[both[1]]
        tokens, positions = self.tokens[chosen], self.positions[chosen]
        return Batch(self.sequences, starts, tokens, positions, slots, lengths), chosen

    def halves(self) -> tuple[Batch, Batch]:
        """The first and the second half of the sequences, each a batch."""
        cut = len(self.sequences) // 2
        row = self.starts[cut]
        first = Batch(
            self.sequences[:cut],
            self.starts[: cut + 1],
            self.tokens[:row],
            self.positions[:row],
            self.slots[:row],
            self.lengths[:cut],
        )
        second = Batch(
            self.sequences[cut:],
            [start - row for start in self.starts[cut:]],
            self.tokens[row:],
            self.positions[row:],
            self.slots[row:],
            self.lengths[cut:],
        )
        return first, second

    @cached_property
    def borders(self) -> Tensor:
        """[B+1] `starts`, on the device."""
        return upload(self.starts, self.tokens.device)

    @cached_property
    def last_rows(self) -> Tensor:
        """[B] index of each sequence's last row."""
        return self.borders[1:] - 1

    @cached_property
    def reads(self) -> list[slice | Tensor]:
        """Per sequence the pool slots of its keys: a slice where its pages are neighbours, else
        indices."""
        return [
            _slots_of(sequence, length, self.tokens.device)
            for sequence, length in zip(self.sequences, self.lengths, strict=True)
        ]

    @cached_property
    def with_many(self) -> list[int]:
        """The sequences of more rows than `few_rows` takes."""
        pairs = enumerate(itertools.pairwise(self.starts))
        return [index for index, (first, end) in pairs if end - first > few_rows.MOST]

    @property
    def has_few(self) -> bool:
        """Whether any sequence has few rows."""
        return len(self.with_many) < len(self.sequences)

    @cached_property
    def paged(self) -> PagedRows:
        """Rows, lengths and page tables as paged attention takes them; tables are filled up with
        page 0, which is not read there."""
        size = self.sequences[0].page_size
        counts = [-(-length // size) for length in self.lengths]
        tables = [
            sequence.pages[:count] + [0] * (max(counts) - count)
            for sequence, count in zip(self.sequences, counts, strict=True)
        ]
        device = self.tokens.device
        most = max(end - first for first, end in itertools.pairwise(self.starts))
        return PagedRows(
            self.borders,
            upload(self.lengths, device),
            upload(tables, device, torch.int32),
            size,
            most,
            max(self.lengths),
            None if self.trees is None else self.trees.drafted(self.starts, self.positions),
        )

    @cached_property
    def write(self) -> slice | Tensor:
        """The slots of all rows: a slice where they are neighbours, else `slots`."""
        if len(self.sequences) == 1 and isinstance(self.reads[0], slice):
            stop = self.reads[0].stop
            return slice(stop - self.tokens.shape[0], stop)
        return self.slots


@dataclass(frozen=True)
class BatchTrees:
    """The trees of a batch's sequences.

    Attributes:
        parents: of B trees, see `Batch.build`. tables: of the same. columns: [B] the slots that
            each tree takes.
    """

    parents: list[list[int]]
    tables: TreeTables
    columns: list[int]

    @classmethod
    def build(cls, parents: list[list[int]], device: torch.device) -> BatchTrees:
        """Tables from parents (see `Batch.build`)."""
        columns = [len(each) for each in parents]
        most = max(columns)
        padded = [each + [ABSENT] * (most - len(each)) for each in parents]
        height = max(max(depths_of(each)) for each in parents)
        table = upload(padded, device, torch.int64)
        return cls(parents, build_trees(table, height), columns)

    def ancestry(self, index: int, rows: int) -> Tensor:
        """[rows, C] of a sequence's last rows over its tree, see `tree_build`."""
        columns = self.columns[index]
        return self.tables.ancestry[index, columns - rows : columns, :columns]

    def drafted(self, starts: list[int], positions: Tensor) -> DraftedRows:
        """The same for paged attention: [N, C] and [B]."""
        columns = upload(self.columns, positions.device)
        if len(self.columns) == 1:
            return DraftedRows(self.ancestry(0, starts[1]).contiguous(), columns, positions)
        borders = list(itertools.pairwise(starts))
        trees = [index for index, (first, end) in enumerate(borders) for _ in range(first, end)]
        rows = [
            self.columns[index] - (end - first) + row
            for index, (first, end) in enumerate(borders)
            for row in range(end - first)
        ]
        place = upload([trees, rows], positions.device)
        return DraftedRows(self.tables.ancestry[place[0], place[1]], columns, positions)


def _slots_of(sequence: Sequence, length: int, device: torch.device) -> slice | Tensor:
    size = sequence.page_size
    pages = sequence.pages[: -(-length // size)]
    if pages[-1] - pages[0] == len(pages) - 1 and all(
        b - a == 1 for a, b in zip(pages[:-1], pages[1:], strict=True)
    ):
        return slice(pages[0] * size, pages[0] * size + length)
    base = upload(pages, device)[:, None] * size + torch.arange(size, device=device)
    return base.flatten()[:length]


class PagedContext(OverPages):
    """Attention over the pages: each layer stores its rows, then every row sees its sequence up to
    itself, or of a tree its own path.

    Args:
        first_layer: where this model's layer 0 lies in the pool (the head's layers follow the
            target's).
    """

    def __init__(self, pool: KVPool, batch: Batch, first_layer: int = 0) -> None:
        self.pool = pool
        self.batch = batch
        self.first_layer = first_layer

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See `models.attention.AttentionContext`."""
        batch = self.batch
        keys, values = self.pool.layer(self.first_layer + layer, k[0], v[0])
        if self.pool.attention is not None:
            kv_append(keys, values, k[0], v[0], batch.slots)
            given = {"scaling": scaling, "window": window, "softcap": softcap}
            return self.pool.attention(q[0], keys, values, batch, **given)[None]
        if use_triton(k):
            kv_append(keys, values, k[0], v[0], batch.slots)
            out = paged_attention(
                q[0],
                keys,
                values,
                batch.paged,
                scaling=scaling,
                window=window,
                softcap=softcap,
            )
            return out[None]
        inside = is_prefix(values, keys)
        if few_rows.serves(k) and not inside:
            return self._few_and_many(q[0], k[0], v[0], keys, values, scaling, window, softcap)
        if isinstance(batch.write, slice):
            keys[:, batch.write] = k[0]
            if not inside:
                values[:, batch.write] = v[0]
        else:
            keys.index_copy_(1, batch.write, k[0])
            if not inside:
                values.index_copy_(1, batch.write, v[0])
        parts = [
            self._one(index, q[0], keys, values, scaling, window, softcap)
            for index in range(len(batch.sequences))
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def few_rows(self, layers: range, like: Tensor) -> PagedLayers | None:
        """See `models.attention.OverPages`."""
        batch = self.batch
        if batch.with_many or self.pool.attention or not few_rows.serves(like):
            return None
        other = like.clone()  # values are stored beside keys, not in them
        both = [self.pool.layer(self.first_layer + layer, like, other) for layer in layers]
        keys, values = [keys for keys, _ in both], [values for _, values in both]
        return PagedLayers(batch.paged, batch.slots, keys, values)

    def _few_and_many(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Sequences of few rows in one call, each of the others by itself."""
        batch = self.batch
        kv_append(keys, values, k, v, batch.slots)
        if batch.has_few:
            out = few_rows.few_rows_attention(
                q, keys, values, batch.paged, scaling=scaling, window=window, softcap=softcap
            )
        else:
            out = q.new_empty(q.shape[1], q.shape[0], values.shape[2])
        for index in batch.with_many:
            rows = slice(batch.starts[index], batch.starts[index + 1])
            out[rows] = self._one(index, q, keys, values, scaling, window, softcap)
        return out[None]

    def _one(
        self,
        index: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """[n, Hq, Dv] of one sequence's rows."""
        batch, read = self.batch, self.batch.reads[index]
        rows = slice(batch.starts[index], batch.starts[index + 1])
        seen = q[:, rows], keys[:, read], values[:, read]
        if batch.trees is None:
            out = causal_attention(*seen, scaling, window, softcap)
        else:
            ancestry = batch.trees.ancestry(index, rows.stop - rows.start)
            out = tree_attention(*seen, ancestry, scaling, window, softcap)
        return out.transpose(0, 1)
