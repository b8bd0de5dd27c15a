"""How many drafts each request gets in a step: always K, or as many as pay.

A step over B sequences with chains of k_1 .. k_B drafts gives, as far as one can foresee,

    tokens = sum_b 1 + sum_{j <= k_b} prod_{i <= j} a_b,i      a: chance that draft i is kept
    cost   = c(B + sum_b k_b) + d max_b k_b                    c: a pass of so many rows, d: a draft

and the chains are chosen for the most tokens per cost (the goodput of Liu et al., arXiv 2406.14066,
with a chance for each position of each request). Since a request's products fall with j, the best
chains of m drafts in all, none longer than D, are those of the m largest products: every m and D is
tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol
from weakref import WeakKeyDictionary

from .config import EngineConfig
from .sequence import Sequence

_HOPE = 0.8  # the chance of a draft before any was judged: high, so that it is tried
_NEWEST = 0.2  # weight of the newest outcome in a running average
_PROBE = 64  # steps after which a request is given all K drafts again
_STALE = 512  # passes after which a time that was not measured again is forgotten


class DraftLengths(Protocol):
    """Decides how many drafts to ask for."""

    def choose(self, sequences: list[Sequence]) -> list[int]:
        """Drafts for each sequence of a decode-only step, 0 to K; limits of its answer aside."""
        ...

    def learn(
        self,
        sequences: list[Sequence],
        drafted: list[int],
        accepted: list[int],
        seconds: Mapping[str, float],
    ) -> None:
        """What the step came to: drafts made and kept by sequence, seconds by activity."""
        ...


def draft_lengths(config: EngineConfig) -> DraftLengths:
    """Those that the engine's settings ask for."""
    if config.adaptive:
        return AdaptiveLengths(config.draft_tokens, MeasuredCosts())
    return FixedLengths(config.draft_tokens)


class FixedLengths:
    """Always K."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def choose(self, sequences: list[Sequence]) -> list[int]:
        """See `DraftLengths`."""
        return [self.longest] * len(sequences)

    def learn(
        self,
        sequences: list[Sequence],
        drafted: list[int],
        accepted: list[int],
        seconds: Mapping[str, float],
    ) -> None:
        """Nothing depends on it."""


class Costs(Protocol):
    """What a pass and a draft cost, in one unit."""

    def verify(self, rows: int) -> float:
        """c: a pass over so many rows."""
        ...

    def draft(self) -> float:
        """d: one draft more for every sequence of the batch."""
        ...

    def add(self, rows: int, seconds: float, drafts: int, draft_seconds: float) -> None:
        """A step: rows verified and how long it took but for drafting; length of the longest chain
        and how long drafting took."""
        ...


@dataclass(frozen=True)
class FixedCosts:
    """Costs that are known: c(rows) = base + rows * per_row. Chains depend on outcomes alone, not
    on the clock."""

    base: float
    per_row: float
    per_draft: float

    def verify(self, rows: int) -> float:
        """See `Costs`."""
        return self.base + rows * self.per_row

    def draft(self) -> float:
        """See `Costs`."""
        return self.per_draft

    def add(self, rows: int, seconds: float, drafts: int, draft_seconds: float) -> None:
        """See `Costs`; nothing is measured."""


@dataclass
class _Average:
    """A running average (None before there is one), and the pass that renewed it last."""

    value: float | None = None
    renewed: int = 0

    def add(self, value: float, now: int) -> None:
        old = self.value
        self.value = value if old is None else old + _NEWEST * (value - old)
        self.renewed = now


@dataclass
class MeasuredCosts:
    """Running averages of the engine's own seconds, by rows of a pass.

    What was never measured is guessed low, so that it is tried: between two measured counts of rows
    on the line, above the largest like it, below the smallest in proportion. The first pass of a
    count is left out (it may compile), and an average that is not renewed is forgotten, so that one
    slow moment is not believed for ever.
    """

    _passes: int = 0
    _by_rows: dict[int, _Average] = field(default_factory=dict)
    _known: list[tuple[int, float]] = field(default_factory=list)
    _draft: _Average = field(default_factory=_Average)

    def add(self, rows: int, seconds: float, drafts: int, draft_seconds: float) -> None:
        """See `Costs`."""
        self._passes += 1
        if rows not in self._by_rows:
            self._by_rows[rows] = _Average(renewed=self._passes)
        else:
            self._by_rows[rows].add(seconds, self._passes)
        if drafts:
            self._draft.add(draft_seconds / drafts, self._passes)
        for average in self._by_rows.values():
            if self._passes - average.renewed > _STALE:
                average.value = None
        self._known = sorted(
            (count, average.value)
            for count, average in self._by_rows.items()
            if average.value is not None
        )

    def verify(self, rows: int) -> float:
        """See `Costs`; 1 before anything was measured."""
        known = self._known
        if not known:
            return 1.0
        place = bisect_left(known, (rows,))
        if place == len(known):
            return known[-1][1]
        above, cost = known[place]
        if not place:
            return cost * rows / above
        below, less = known[place - 1]
        return less + (cost - less) * (rows - below) / (above - below)

    def draft(self) -> float:
        """See `Costs`; 0 before anything was drafted."""
        return self._draft.value or 0.0


@dataclass
class _Outcomes:
    """Of one request: the running chance of each position given that those before it were kept, and
    the steps since all K were asked for."""

    chances: list[float]
    since: int = 0


class AdaptiveLengths:
    """The chains that promise the most tokens per cost.

    Args:
        longest: K. costs: `MeasuredCosts`, or `FixedCosts` where chains must not depend on time.
    """

    def __init__(self, longest: int, costs: Costs) -> None:
        self.longest = longest
        self.costs = costs
        self._known: WeakKeyDictionary[Sequence, _Outcomes] = WeakKeyDictionary()

    def choose(self, sequences: list[Sequence]) -> list[int]:
        """See `DraftLengths`; K again every 64th step, since what is not tried is not learnt."""
        known = [self._of(sequence) for sequence in sequences]
        counts = self._best([list(accumulate(one.chances, mul)) for one in known])
        for index, one in enumerate(known):
            if one.since >= _PROBE:
                counts[index] = self.longest
            one.since = 0 if counts[index] == self.longest else one.since + 1
        return counts

    def learn(
        self,
        sequences: list[Sequence],
        drafted: list[int],
        accepted: list[int],
        seconds: Mapping[str, float],
    ) -> None:
        """See `DraftLengths`; a draft behind one that was not kept says nothing."""
        for sequence, made, kept in zip(sequences, drafted, accepted, strict=True):
            chances = self._of(sequence).chances
            for position in range(min(made, kept + 1)):
                outcome = float(position < kept)
                chances[position] += _NEWEST * (outcome - chances[position])
        rest = sum(spent for activity, spent in seconds.items() if activity != "draft")
        rows = len(sequences) + sum(drafted)
        self.costs.add(rows, rest, max(drafted, default=0), seconds.get("draft", 0.0))

    def _of(self, sequence: Sequence) -> _Outcomes:
        return self._known.setdefault(sequence, _Outcomes([_HOPE] * self.longest))

    def _best(self, products: list[list[float]]) -> list[int]:
        """Chains by sequence; of equal rates the fewest rows."""
        size, drafts = len(products), self.longest * len(products)
        passes = [self.costs.verify(size + count) for count in range(drafts + 1)]
        step = self.costs.draft()
        best, chosen = size / passes[0], [0] * size
        for deepest in range(1, self.longest + 1):
            order = sorted(
                (-products[index][depth], depth, index)
                for index in range(size)
                for depth in range(deepest)
            )
            counts, tokens = [0] * size, float(size)
            for total, (product, _, index) in enumerate(order, 1):
                counts[index] += 1
                tokens -= product
                rate = tokens / (passes[total] + step * deepest)
                if rate > best:
                    best, chosen = rate, list(counts)
        return chosen
