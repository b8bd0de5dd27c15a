"""Supervised runs: enough to count a batch's targets without reading its tokens or states."""

from __future__ import annotations

import numpy as np


def supervised_spans(supervised: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of each unbroken run of true in [n] bool. Such a run is one answer."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], supervised.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def supervised_runs(supervised: np.ndarray) -> list[int]:
    """Lengths of the spans; one less for a span at the very start, since the row's first token has
    no head row in front of it.
    """
    return [end - max(start, 1) for start, end in supervised_spans(supervised)]


class RunIndex:
    """Supervised runs of many rows.

    Args:
        runs: [S] int, the run lengths of all rows, end to end.
        offsets: [R+1] int, where each row's runs begin.
    """

    def __init__(self, runs: np.ndarray, offsets: np.ndarray) -> None:
        self._runs = runs.astype(np.int64)
        self._rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        self._size = len(offsets) - 1

    def counts(self, steps: int) -> np.ndarray:
        """[R, K] int64: how many head rows of each row are supervised at step k
        (`kernels.shift.supervision`).

        At step k a run of length m holds max(0, m - 1 - k) of them.
        """
        counts = np.zeros((self._size, steps), np.int64)
        for step in range(steps):
            np.add.at(counts[:, step], self._rows, np.maximum(self._runs - 1 - step, 0))
        return counts
