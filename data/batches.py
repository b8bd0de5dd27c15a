"""Packed batches in a fixed global order.

Every epoch is a seeded permutation of the rows, packed best-fit into batches of at most
`tokens_per_batch`: a row goes where it leaves the least room. A longer row is a batch of its own.
Batches are numbered through all epochs; that one number is the whole cursor. Rank r of W ranks
takes the batches cursor + r, cursor + r + W, ...: the global order is the same for any W, so a run
may resume with another number of ranks.
Legend: N packed tokens, R rows, B boundaries, H hidden, K unroll steps.
"""

from __future__ import annotations

import itertools
import warnings
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels.shift import supervision


class RowSource(Protocol):
    """What batches are packed from: a `Cache`, `OnlineRows`, `RemoteRows`.

    Rows are numbered 0 .. R-1 and never change. `lengths`, `ids` and `supervised_counts` are known
    without reading a state, so an epoch is planned before any of it is read. `gather` is called
    from one thread at a time, which need not be the one that made the source.
    """

    @property
    def lengths(self) -> np.ndarray:
        """[R] int, tokens of each row, none 0."""
        ...

    @property
    def ids(self) -> list[str]:
        """R names, for messages."""
        ...

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The B boundaries whose states `gather` gives."""
        ...

    def supervised_counts(self, steps: int) -> np.ndarray:
        """[R, K] int64: supervised head rows of each row at step k."""
        ...

    def gather(self, indices: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The named rows in the order asked for: tokens R x [n] int64, masks R x [n] bool, raw
        states [N, B·H] with the boundaries side by side. A row whose states are not finite or do
        not fit its tokens is a ValueError that names it."""
        ...


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows end to end; nothing is padded.

    Attributes:
        tokens: [N] int64. supervised: [N] bool, true where the assistant wrote the token.
        hidden: [N, H], raw states (of boundary L before the final norm); [N, B·H] where B
            boundaries are read.
        starts: [R+1] int32, starts[0] = 0, starts[R] = N. positions: [N] int64, 0, 1, ... inside
            each row.
        row_ids: names of the R rows. index: its number in the global order, None outside of one.
    """

    tokens: Tensor
    supervised: Tensor
    hidden: Tensor
    starts: Tensor
    positions: Tensor
    row_ids: tuple[str, ...]
    index: int | None = None

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in held.items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    @property
    def num_tokens(self) -> int:
        """The tokens that this batch stands for."""
        return self.tokens.numel()

    def chains(self, steps: int) -> Tensor:
        """Which rows of which step learn from this batch, [K, N] bool; see
        `kernels.shift.supervision`."""
        return supervision(self.supervised, self.starts, steps)


class BatchPlan:
    """Which rows make up which global batch.

    Args:
        source: where rows come from.
        tokens_per_batch: upper limit of N. Longer rows are told of once and stay whole, each a
            batch of its own.
        seed: of the permutations.
        rank, world_size: this process among those that share the batches.
    Raises:
        ValueError: no rows, none with a supervised head row, or a rank outside the world; names it
            and the remedy.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        tokens_per_batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        lengths = np.asarray(source.lengths)
        if not len(lengths):
            raise ValueError(
                "the source holds no rows; run prepare and dump with more conversations"
            )
        counts = source.supervised_counts(1)
        if not counts.any():
            raise ValueError(
                f"none of the {len(lengths)} rows holds two supervised tokens in a row, so there "
                "is nothing to learn; look at the mask with `prepare --show 3`"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: must lie in 0 .. world_size - 1")
        self.source = source
        self.tokens_per_batch = tokens_per_batch
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._lengths: list[int] = lengths.tolist()
        self._firsts = [0]  # global index of each known epoch's first batch, and of the one after
        self._last: tuple[int, list[list[int]]] = (-1, [])
        self._counts = counts
        _tell_of_long_rows(lengths, source.ids, tokens_per_batch)

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """Row numbers of every batch of one epoch; each row appears once."""
        if self._last[0] != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self._lengths))
            self._last = (epoch, self._pack(order.tolist()))
        return self._last[1]

    def _pack(self, order: list[int]) -> list[list[int]]:
        """Best fit: a row goes to the batch that it fills most, the newest of equals, or opens
        one; batches are numbered as they were opened."""
        batches: list[list[int]] = []
        least = min(self._lengths)  # a batch with less room than this is full
        rooms: list[int] = []  # sorted, each once: the rooms that some open batch has
        having: dict[int, list[int]] = {}  # room -> batches
        for row in order:
            length = self._lengths[row]
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                number = having[room].pop()
                if not having[room]:
                    del rooms[place], having[room]
            else:
                room, number = self.tokens_per_batch, len(batches)
                batches.append([])
            batches[number].append(row)
            left = room - length
            if left >= least:
                if left not in having:
                    insort(rooms, left)
                having.setdefault(left, []).append(number)
        return batches

    @property
    def fill(self) -> float:
        """Mean tokens of a batch of the first epoch as a share of `tokens_per_batch`; rows longer
        than that count whole."""
        return sum(self._lengths) / (self.num_batches() * self.tokens_per_batch)

    def epoch_of(self, index: int) -> tuple[int, int]:
        """(epoch, place in it) of a global batch."""
        if index < 0:
            raise ValueError(f"batch {index}: global indices begin at 0")
        while self._firsts[-1] <= index:
            batches = self.epoch_batches(len(self._firsts) - 1)
            self._firsts.append(self._firsts[-1] + len(batches))
        epoch = int(np.searchsorted(self._firsts, index, "right")) - 1
        return epoch, index - self._firsts[epoch]

    def num_batches(self, epochs: int = 1) -> int:
        """Global batches in the first `epochs` epochs."""
        while len(self._firsts) <= epochs:
            self.epoch_of(self._firsts[-1])
        return self._firsts[epochs]

    def rows(self, index: int) -> list[int]:
        """Row numbers of a global batch."""
        epoch, place = self.epoch_of(index)
        return self.epoch_batches(epoch)[place]

    def tokens(self, index: int) -> int:
        """N of a global batch, without reading it."""
        return sum(self._lengths[row] for row in self.rows(index))

    def supervised(self, index: int, steps: int) -> tuple[int, ...]:
        """Supervised head rows of a global batch at each of K steps, without reading it."""
        if self._counts.shape[1] < steps:
            self._counts = self.source.supervised_counts(steps)
        return tuple(self._counts[self.rows(index), :steps].sum(0).tolist())

    def batch(self, index: int) -> PackedBatch:
        """Read a global batch."""
        rows = self.rows(index)
        tokens, supervised, hidden = self.source.gather(rows)
        lengths = [len(part) for part in tokens]
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        if hidden.shape[0] != int(starts[-1]):
            raise ValueError(
                f"batch {index}: {int(starts[-1])} tokens came with {hidden.shape[0]} states (rows "
                f"{[self.source.ids[row] for row in rows]}); the source is damaged"
            )
        return PackedBatch(
            torch.cat(tokens),
            torch.cat(supervised),
            hidden,
            starts,
            torch.cat([torch.arange(length) for length in lengths]),
            tuple(self.source.ids[row] for row in rows),
        )

    def own(self, cursor: int = 0) -> Iterator[int]:
        """This rank's global batch numbers from the cursor on, without end."""
        return itertools.count(cursor + self.rank, self.world_size)

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """The cursor with what gives it its meaning; JSON-ready."""
        return {"cursor": cursor, **self._meaning()}

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """The cursor to go on from.

        Raises:
            ValueError: it was counted over other rows, another seed or another batch size; names
                the field.
        """
        for name, value in self._meaning().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the data cursor was counted with {name}={state.get(name)!r}, this run has "
                    f"{value!r}; resume "
                    "with the same rows, seed and tokens_per_batch (the number of ranks may change)"
                )
        return int(state["cursor"])

    def _meaning(self) -> dict[str, Any]:
        return {
            "num_rows": len(self._lengths),
            "num_tokens": sum(self._lengths),
            "seed": self.seed,
            "tokens_per_batch": self.tokens_per_batch,
            "packing": "best-fit",
        }


def _tell_of_long_rows(lengths: np.ndarray, ids: list[str], tokens_per_batch: int) -> None:
    """One warning for all rows that no batch holds: how many, the longest, and what it costs."""
    count = int((lengths > tokens_per_batch).sum())
    if count:
        longest = int(lengths.argmax())
        size = int(lengths[longest])
        warnings.warn(
            f"{count} of {len(lengths)} rows are longer than tokens_per_batch={tokens_per_batch} "
            f"and stay whole, each a batch of its own; the longest (row {longest}, id "
            f"{ids[longest]!r}) has {size} tokens, so its batch takes "
            f"{size / tokens_per_batch:.1f} times the memory that a batch was sized for. Raise "
            f"tokens_per_batch, or prepare with max_length={tokens_per_batch}, to have all alike",
            stacklevel=3,
        )
