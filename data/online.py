"""Token rows with states made on the spot by the target, in the place of a cache: no disk, one
forward pass a batch.

States pass through bf16 as those of a bf16 cache do, so a head trained online and one trained from
such a cache read the same numbers wherever the same rows share a forward pass (a pass of other
rows rounds differently in the last places).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..inference.capture import capture
from ..models.target import Target, longest_text
from .rowfile import Rows
from .runs import RunIndex, supervised_runs


@dataclass(frozen=True)
class OnlineConfig:
    """Where the target runs when data.source=online."""

    target_ranks: int = 0
    """The last so many processes of the launch hold the target and serve states to the others,
    which train; 0 holds it in every training process."""
    timeout: float = 600.0
    """Seconds within which the processes must find each other, and a batch of states must come."""

    def __post_init__(self) -> None:
        if self.target_ranks < 0:
            raise ValueError(f"target_ranks={self.target_ranks}: must not be negative")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout}: must be positive (seconds)")


class LiveRows(ABC):
    """Rows whose states do not lie on a disk; the interface of `batches.RowSource`.

    Args:
        rows: the token rows, made with the target's tokenizer and chat template.
        fingerprint: the target's.
        boundaries: which states, side by side in this order.
    Raises:
        ValueError: the rows were made with another tokenizer or template.
    """

    def __init__(
        self, rows: Rows, fingerprint: dict[str, str], boundaries: tuple[int, ...]
    ) -> None:
        rows.require_tokenizer(fingerprint)
        self._rows = rows
        self.boundaries = boundaries
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
        """Tokens R x [n] int64, masks R x [n] bool, states [N, B·H] bf16 where `states` puts them.

        Raises:
            ValueError: a state is not finite; names the rows.
        """
        read = [self._rows[index] for index in indices]
        tokens = [torch.from_numpy(row.tokens.astype(np.int64)) for row in read]
        states = self.states(tokens)
        if not torch.isfinite(states).all():
            raise ValueError(
                f"the target gives NaN or infinity for a row among {[row.id for row in read]}; try "
                "target.dtype=float32, or dump to a cache, which leaves such rows out by name"
            )
        return tokens, [torch.from_numpy(row.supervised.copy()) for row in read], states

    @abstractmethod
    def states(self, tokens: list[Tensor]) -> Tensor:
        """[N, B·H] bf16 of several rows, R x [n] int64."""


class OnlineRows(LiveRows):
    """States by a target in this process, on its device.

    Args:
        boundaries: empty means L.
    Raises:
        ValueError: as `LiveRows`, or a row is longer than the target can read.
    """

    def __init__(self, rows: Rows, target: Target, boundaries: tuple[int, ...] = ()) -> None:
        rows.require_length(longest_text(target.folder))
        super().__init__(rows, target.fingerprint, boundaries or (target.num_layers,))
        self._target = target

    def states(self, tokens: list[Tensor]) -> Tensor:
        return live_states(self._target, tokens, self.boundaries)


def live_states(target: Target, tokens: list[Tensor], boundaries: tuple[int, ...]) -> Tensor:
    """[N, B·H] bf16 on the target's device, boundaries side by side; from any thread."""
    on_gpu = target.device.type == "cuda"  # each thread begins with GPU 0 as its current one
    with torch.cuda.device(target.device) if on_gpu else contextlib.nullcontext():
        captured = capture(target, tokens, boundaries)
        return torch.cat([captured[k].to(torch.bfloat16) for k in boundaries], -1)
