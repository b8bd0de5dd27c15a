"""Token rows with states made on the spot by the target, in the place of a cache: no disk, one
forward pass a batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..inference.capture import capture
from ..models.target import Target
from .rowfile import Rows
from .runs import RunIndex, supervised_runs


class OnlineRows:
    """The same interface as `Cache` for `BatchPlan`.

    Args:
        rows: the token rows, made with the target's tokenizer and chat template.
        boundaries: which states, side by side in this order; empty means L.
    Raises:
        ValueError: the rows were made with another tokenizer or template.
    """

    def __init__(self, rows: Rows, target: Target, boundaries: tuple[int, ...] = ()) -> None:
        rows.require_tokenizer(target.fingerprint)
        self._rows = rows
        self._target = target
        self.boundaries = boundaries or (target.num_layers,)
        self.lengths: np.ndarray = rows.lengths
        runs: list[int] = []
        offsets = [0]
        self.ids: list[str] = []
        for row in rows:
            runs += supervised_runs(row.supervised)
            offsets.append(len(runs))
            self.ids.append(row.id)
        self._runs = RunIndex(np.array(runs, np.int64), np.array(offsets))

    def __len__(self) -> int:
        return len(self.lengths)

    def supervised_counts(self, steps: int) -> np.ndarray:
        """[R, K] int64, see `Cache.supervised_counts`."""
        return self._runs.counts(steps)

    def gather(self, indices: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Tokens R x [n] int64, masks R x [n] bool, states [N, B·H] in the target's dtype and on
        its device.

        Raises:
            ValueError: a state is not finite; names the rows.
        """
        read = [self._rows[index] for index in indices]
        tokens = [torch.from_numpy(row.tokens.astype(np.int64)) for row in read]
        captured = capture(self._target, tokens, self.boundaries)
        states = torch.cat([captured[k] for k in self.boundaries], -1)
        if not torch.isfinite(states).all():
            raise ValueError(
                f"the target gives NaN or infinity for a row among {[row.id for row in read]}; try "
                "target.dtype=float32, or dump to a cache, which leaves such rows out by name"
            )
        return tokens, [torch.from_numpy(row.supervised.copy()) for row in read], states
