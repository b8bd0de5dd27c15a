"""Real rows with their states, on which a head is tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..data.cache import Cache
from ..data.rows import Rows
from ..inference.capture import capture
from ..models.target import Target
from ..models.trunk import Trunk

_TOKENS = 4096  # where 2,048 left boundaries one off at 4 standard errors, these give 6 and more


@dataclass(frozen=True)
class Material:
    """About 4,096 tokens of whole rows.

    Attributes:
        trunk: float32. batch: the rows, on its device. states: boundary -> [N, H] raw. more: gives
            the states of further boundaries; None where the target must not be loaded.
    """

    trunk: Trunk
    batch: PackedBatch
    states: dict[int, Tensor]
    more: Callable[[tuple[int, ...]], dict[int, Tensor]] | None = None

    @property
    def answers(self) -> Tensor:
        """[m] int64: the supervised tokens."""
        return self.batch.tokens[self.batch.supervised]

    @classmethod
    def of_cache(cls, trunk: Trunk, cache: Cache, load: Callable[[], Target] | None = None) -> Self:
        """Rows spread over a cache. load: of the target, called by `more` alone."""
        read = [cache.row(index) for index in _spread(cache.lengths.tolist())]
        states = {k: torch.cat([row.states[k] for row in read]) for k in cache.boundaries}
        return cls._packed(
            trunk, [row.tokens for row in read], [row.supervised for row in read], states, load
        )

    @classmethod
    def of_rows(cls, trunk: Trunk, rows: Rows, load: Callable[[], Target]) -> Self:
        """Token rows, whose states the target makes."""
        read = [rows[index] for index in _spread(rows.lengths.tolist())]
        tokens = [torch.from_numpy(row.tokens.copy()).long() for row in read]
        masks = [torch.from_numpy(row.supervised.copy()) for row in read]
        target = load()
        states = capture(target, tokens, (target.num_layers,))
        return cls._packed(trunk, tokens, masks, states, load)

    @classmethod
    def _packed(
        cls,
        trunk: Trunk,
        tokens: list[Tensor],
        masks: list[Tensor],
        states: dict[int, Tensor],
        load: Callable[[], Target] | None,
    ) -> Self:
        lengths = [len(row) for row in tokens]
        batch = PackedBatch(
            torch.cat(tokens),
            torch.cat(masks),
            states[max(states)],
            torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            torch.cat([torch.arange(length) for length in lengths]),
            tuple(f"row {number}" for number in range(len(lengths))),
        )
        more = None if load is None else lambda ids: capture(load(), tokens, ids)
        return cls(trunk, batch.to(trunk.device), states, more)


def _spread(lengths: Sequence[int]) -> list[int]:
    """Rows at even distances, as many as fit; the first in any case."""
    chosen: list[int] = []
    size = 0
    for index in range(0, len(lengths), max(1, sum(lengths) // _TOKENS)):
        if not chosen or size + lengths[index] <= _TOKENS:
            chosen.append(index)
            size += lengths[index]
    return chosen
