"""When drafting pays: the expected speed-up over plain decoding, by draft length and batch size.

    E(K)     = 1 + sum_{j <= K} prod_{i <= j} a_i       tokens of a sequence and step
    S(B, K)  = t(B, B (K + 1)) + K d(B)                 seconds of a step of B sequences
    speed-up = E(K) S(B, 0) / S(B, K)

a_i is the chance that draft i is kept where those before it were (`Rates`, from a report's counts),
t(B, N) a pass of the target that verifies N rows, d(B) one draft more for each of B sequences.
Both are modelled (`ModelledCosts`) or measured (`MeasuredCosts`):

    t(B, N) = o + max((W(N) + B c) / bandwidth, 2 P N' / operations a second)
    W(N)    = D + X (1 - (1 - s)^N)
    N'      = N rounded up to a whole tile

D bytes of weights that every pass reads once, X those of experts of which a row meets the share s,
c bytes of a sequence's keys and values, P parameters that a row is multiplied with (lm_head
included), o what a pass costs whatever its rows. (Leviathan et al., arXiv 2211.17192, theorem 3.8,
has E for one a and a pass that costs the same whatever its rows.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, Protocol

from .tables import main_runs

Run = dict[str, Any]


@dataclass(frozen=True)
class Rates:
    """How often a drafter's drafts were kept.

    Attributes:
        kept, drafted: by position, drafts kept there and drafts that were judged there: those
            whose drafts before were all kept.
    """

    drafter: str
    temperature: float
    kept: tuple[int, ...]
    drafted: tuple[int, ...]

    @property
    def measured(self) -> int:
        """The longest chain there is a count for."""
        return len(self.kept)

    def at(self, position: int) -> float:
        """a_i, positions from 1; behind the last that was measured, the last that was."""
        place = min(position, self.measured) - 1
        return self.kept[place] / self.drafted[place]

    def tokens(self, drafts: int) -> float:
        """E(K)."""
        chances = (self.at(position) for position in range(1, drafts + 1))
        return 1.0 + sum(accumulate(chances, mul))


def chains(runs: Sequence[Run]) -> list[Run]:
    """Runs that drafted K tokens in every step, which is what a rate by position is counted on: no
    look-up, no trees, nothing adaptive."""
    return [
        run
        for run in runs
        if run["num_drafts"]
        and not run["drafter"].startswith("ngram")
        and not run.get("tree")
        and not run.get("adaptive")
        and set(run["drafted_per_position"]) == {run["num_drafts"]}
    ]


def rates(runs: Sequence[Run]) -> list[Rates]:
    """Of every drafter and temperature, over all prompt sets and lengths together."""
    groups: dict[tuple[str, float], list[Run]] = {}
    for run in chains(runs):
        groups.setdefault((run["drafter"], run["temperature"]), []).append(run)
    found = []
    for (drafter, temperature), members in groups.items():
        kept, drafted = [], []
        for place in range(max(len(run["accepted_per_position"]) for run in members)):
            here = [run for run in members if len(run["accepted_per_position"]) > place]
            judged = sum(
                run["accepted_per_position"][place - 1] if place else run["num_drafts"]
                for run in here
            )
            if not judged:
                break
            drafted.append(judged)
            kept.append(sum(run["accepted_per_position"][place] for run in here))
        found.append(Rates(drafter, temperature, tuple(kept), tuple(drafted)))
    return found


class Costs(Protocol):
    """Seconds of the two things that a step is made of."""

    def verify(self, sequences: int, rows: int) -> float:
        """t(B, N)."""
        ...

    def draft(self, sequences: int) -> float:
        """d(B)."""
        ...


@dataclass(frozen=True)
class Weights:
    """What a pass reads and multiplies with.

    Attributes:
        dense, experts: bytes. share: of the experts that one row meets. parameters: that a row is
            multiplied with. keys: bytes of one sequence's keys and values.
    """

    dense: float
    parameters: float
    experts: float = 0.0
    share: float = 1.0
    keys: float = 0.0


@dataclass(frozen=True)
class ModelledCosts:
    """See the module's text.

    Attributes:
        target: of a pass over the target. head: of one draft, keys left out. bandwidth, flops:
            bytes and operations a second that are reached. tile: rows that a product computes
            anyway. overhead: o, seconds.
    """

    target: Weights
    head: Weights
    bandwidth: float
    flops: float
    tile: int
    overhead: float = 0.0

    def verify(self, sequences: int, rows: int) -> float:
        """See `Costs`."""
        return self._pass(self.target, sequences, rows)

    def draft(self, sequences: int) -> float:
        """See `Costs`."""
        return self._pass(self.head, sequences, sequences)

    def _pass(self, weights: Weights, sequences: int, rows: int) -> float:
        met = weights.experts * (1 - (1 - weights.share) ** rows)
        read = weights.dense + met + sequences * weights.keys
        padded = self.tile * math.ceil(rows / self.tile)
        work = 2 * weights.parameters * padded
        return self.overhead + max(read / self.bandwidth, work / self.flops)


@dataclass(frozen=True)
class MeasuredCosts:
    """Medians of a report's own steps.

    Attributes:
        passes: sequences -> (rows, seconds of a step without its drafts), by rows. drafts:
            sequences -> seconds of a draft, of the head's pass over true states among them.
    """

    passes: dict[int, list[tuple[int, float]]]
    drafts: dict[int, float]

    @classmethod
    def of(cls, runs: Iterable[Run], drafter: str) -> MeasuredCosts:
        """From the `passes` of plain runs and of a drafter's; where several runs have steps of
        one shape, their mean, each weighted by its steps."""
        steps: dict[tuple[int, int], list[tuple[int, float]]] = {}
        drafts: dict[int, list[tuple[int, float]]] = {}
        for run in runs:
            if run["drafter"] not in ("none", drafter):
                continue
            for one in run.get("passes") or ():
                sequences, rows, count = one["sequences"], one["rows"], one["count"]
                spent = one["median"]
                drafting = spent.get("draft", 0.0) + spent.get("refill", 0.0)
                steps.setdefault((sequences, rows), []).append((count, spent["step"] - drafting))
                if rows > sequences and rows == sequences * (run["draft_tokens"] + 1):
                    each = drafting / run["draft_tokens"]
                    drafts.setdefault(sequences, []).append((count, each))
        passes: dict[int, list[tuple[int, float]]] = {}
        for (sequences, rows), told in sorted(steps.items()):
            passes.setdefault(sequences, []).append((rows, _mean(told)))
        return cls(passes, {sequences: _mean(told) for sequences, told in drafts.items()})

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of sequences that were measured both plain and with drafts."""
        return tuple(
            sequences
            for sequences, points in self.passes.items()
            if points[0][0] == sequences and sequences in self.drafts
        )

    def verify(self, sequences: int, rows: int) -> float:
        """On the line between the counts of rows that were measured; above them on the line
        through the first and the last, below them as the first."""
        points = self.passes[sequences]
        for (low, below), (high, above) in pairwise(points):
            if low <= rows <= high:
                return below + (above - below) * (rows - low) / (high - low)
        (first, least), (last, most) = points[0], points[-1]
        slope = max(0.0, (most - least) / (last - first)) if last > first else 0.0
        return most + slope * (rows - last) if rows > last else least

    def draft(self, sequences: int) -> float:
        """See `Costs`."""
        return self.drafts[sequences]


def _mean(told: Sequence[tuple[int, float]]) -> float:
    return sum(count * value for count, value in told) / sum(count for count, _ in told)


@dataclass(frozen=True)
class Payoff:
    """Speed-ups over plain decoding.

    Attributes:
        rates: what they follow from. speedups: batch size -> that of 1, 2, … drafts.
    """

    rates: Rates
    speedups: dict[int, tuple[float, ...]]

    def best(self, batch: int) -> int:
        """The K of the highest speed-up; 0 where none is above 1."""
        highest = max(self.speedups[batch])
        return self.speedups[batch].index(highest) + 1 if highest > 1 else 0

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, rates with their counts."""
        return {
            "drafter": self.rates.drafter,
            "temperature": self.rates.temperature,
            "kept": list(self.rates.kept),
            "drafted": list(self.rates.drafted),
            "tokens_per_step": [
                self.rates.tokens(drafts) for drafts in range(1, self._longest + 1)
            ],
            "speedups": {str(batch): list(told) for batch, told in self.speedups.items()},
            "best_draft_tokens": {str(batch): self.best(batch) for batch in self.speedups},
        }

    @property
    def _longest(self) -> int:
        return len(next(iter(self.speedups.values())))


def speedup(rates: Rates, costs: Costs, batch: int, drafts: int) -> float:
    """That of K drafts for each of B sequences."""
    plain = costs.verify(batch, batch)
    step = costs.verify(batch, batch * (drafts + 1)) + drafts * costs.draft(batch)
    return rates.tokens(drafts) * plain / step


def payoff(rates: Rates, costs: Costs, batches: Sequence[int], longest: int) -> Payoff:
    """For every batch size and 1 … longest drafts."""
    return Payoff(
        rates,
        {
            batch: tuple(speedup(rates, costs, batch, drafts) for drafts in range(1, longest + 1))
            for batch in batches
        },
    )


@dataclass(frozen=True)
class Check:
    """A measured speed-up and what the formula gives from the *other* runs of its report.

    Attributes:
        measured: decoded tokens a second, prompts' passes left out, over those of plain decoding on
            the same prompts, all sets together. left_out: whether runs of this K were kept out of
            what `expected` was made from; else there was no other K.
    """

    drafter: str
    temperature: float
    drafts: int
    batch: int
    expected: float
    measured: float
    left_out: bool

    @property
    def off(self) -> float:
        """Relative error."""
        return self.expected / self.measured - 1


def checks(runs: Sequence[Run]) -> list[Check]:
    """One for every drafter, temperature and K of a report's main runs that hold their passes."""
    found = []
    main = main_runs(runs)
    groups: dict[tuple[str, float, int], list[Run]] = {}
    for run in chains(main):
        key = (run["drafter"], run["temperature"], run["draft_tokens"])
        groups.setdefault(key, []).append(run)
    for (drafter, temperature, drafts), members in groups.items():
        peers = [run for run in main if run["temperature"] == temperature]
        others = [run for run in peers if run not in members]
        lengths = {run["draft_tokens"] for run in chains(others) if run["drafter"] == drafter}
        source, batch = others if lengths else peers, members[0]["batch"]
        costs = MeasuredCosts.of(source, drafter)
        known = [one for one in rates(source) if one.drafter == drafter]
        plain = [run for run in peers if run["drafter"] == "none"]
        if batch not in costs.batches or not known or not plain:
            continue
        measured = _decode_rate(members) / _decode_rate(plain)
        expected = speedup(known[0], costs, batch, drafts)
        found.append(Check(drafter, temperature, drafts, batch, expected, measured, bool(lengths)))
    return found


def _decode_rate(runs: Sequence[Run]) -> float:
    seconds = sum(run["seconds"] - run["time"].get("prefill", 0.0) for run in runs)
    return sum(run["decode_tokens"] for run in runs) / seconds
