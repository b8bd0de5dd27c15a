"""How far a figure would move with other prompts: percentile bootstrap over prompts.

The figure is a ratio of sums, tokens / target calls. Prompts are drawn with replacement and both
sums taken anew, so that tokens of one answer, which are not independent, stay together. The draws
are the same in every call over equally many prompts: a difference of two runs over the same prompts
is paired. (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
SEED = 0


class Interval(NamedTuple):
    """A figure and where 95 % of its resamples lie."""

    value: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether the figure may well be zero."""
        return self.low <= 0 <= self.high


def ratio(counts: np.ndarray) -> Interval | None:
    """Tokens per target call over P prompts.

    Args:
        counts: [P, 2], a prompt's decoded tokens and target calls.
    Returns:
        None where P < 2, or no target was called: nothing can be said of other prompts.
    """
    return _interval(counts, lambda sums: sums[:, 0] / sums[:, 1])


def difference(ours: np.ndarray, theirs: np.ndarray) -> Interval | None:
    """Tokens per target call of one run less those of another over the same P prompts.

    Args:
        ours, theirs: [P, 2] each, prompts in the same order.
    Returns:
        None as for `ratio`.
    """
    assert ours.shape == theirs.shape
    return _interval(
        np.concatenate([ours, theirs], 1),
        lambda sums: sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3],
    )


@lru_cache(maxsize=4)
def _draws(prompts: int) -> np.ndarray:
    """[R, P]: how often each prompt is drawn."""
    even = np.full(prompts, 1 / prompts)
    return np.random.default_rng(SEED).multinomial(prompts, even, RESAMPLES).astype(np.float64)


def _interval(counts: np.ndarray, figure: Callable[[np.ndarray], np.ndarray]) -> Interval | None:
    """`figure` maps sums [R, C] to [R]; odd columns are what it divides by."""
    prompts = len(counts)
    whole = counts.sum(0, keepdims=True)
    if prompts < 2 or not whole[:, 1::2].all():
        return None
    sums = _draws(prompts) @ counts
    drawn = figure(sums[sums[:, 1::2].all(1)])  # answers of one token call no target
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(float(figure(whole)[0]), float(low), float(high))
