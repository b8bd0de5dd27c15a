"""What a run counts, with the definitions its numbers are printed with. Names and meanings are
vLLM's.

A *draft* is one sequence in one decode-only step for which at least one token was drafted. Rounds
that the token limit or an end token cut short are left out of the acceptance figures (an oracle
must score K + 1), but in the tokens per target call.

    mean_acceptance_length   1 + num_accepted_tokens / num_drafts, the bonus token included
    tokens_per_target_call   tokens / sequence-steps, both of decode-only steps (the headline)
    accepted_per_position    [i] = drafts whose tokens 1..i+1 were all accepted (unconditional)

Of a tree, num_draft_tokens counts every node that was verified, and a position is a level: drafted
there when the tree reached it, accepted when the kept path did.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CONTEXT_EDGES = tuple(1 << power for power in range(8, 31))
"""Where one bucket of context ends and the next begins, in tokens: 256, 512, 1024, …"""


@dataclass
class EngineMetrics:
    """Raw counts and seconds of one engine since its creation or the last reset."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    cut_drafts: int = 0
    target_calls: int = 0
    """Sequence-steps of decode-only steps."""
    decode_tokens: int = 0
    """Tokens those emitted."""
    tokens_per_step_histogram: list[int] = field(default_factory=list)
    """[i] = sequence-steps that emitted i tokens."""
    drafts_per_step_histogram: list[int] = field(default_factory=list)
    """[k] = sequence-steps that verified k drafts, rounds that were cut short among them."""
    by_context: dict[int, list[int]] = field(default_factory=dict)
    """Context bucket (lower bound, tokens) -> [target calls, tokens]."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by activity: prefill, draft, verify, refill, sample."""

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Add the time spent inside to `activity`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + time.perf_counter() - start

    def record(
        self,
        context: int,
        drafted: int,
        accepted: int,
        emitted: int,
        cut: bool,
        depth: int | None = None,
    ) -> None:
        """One sequence in one decode-only step.

        Args:
            context: tokens before the step. drafted, accepted: drafts. emitted: tokens kept, the
                target's included.
            cut: whether the limit or an end token cut the round short.
            depth: levels of the tree that was drafted; None for a chain.
        """
        self.target_calls += 1
        self.decode_tokens += emitted
        _count(self.tokens_per_step_histogram, emitted, 1)
        _count(self.drafts_per_step_histogram, drafted, 1)
        calls = self.by_context.setdefault(context_bucket(context), [0, 0])
        calls[0] += 1
        calls[1] += emitted
        if not drafted:
            return
        if cut:
            self.cut_drafts += 1
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        for position in range(drafted if depth is None else depth):
            _count(self.drafted_per_position, position, 1)
            _count(self.accepted_per_position, position, int(position < accepted))

    def add(self, other: EngineMetrics) -> None:
        """Take in the counts and seconds of another engine's run: all of them are sums."""
        for name in (
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "cut_drafts",
            "target_calls",
            "decode_tokens",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in (
            "accepted_per_position",
            "drafted_per_position",
            "tokens_per_step_histogram",
            "drafts_per_step_histogram",
        ):
            for index, count in enumerate(getattr(other, name)):
                _count(getattr(self, name), index, count)
        for low, (calls, tokens) in other.by_context.items():
            own = self.by_context.setdefault(low, [0, 0])
            own[0] += calls
            own[1] += tokens
        for activity, seconds in other.seconds.items():
            self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    def to_json(self) -> dict[str, Any]:
        """The raw counts and the two figures made of them; buckets of context are named by their
        lower bound."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_per_position": list(self.accepted_per_position),
            "drafted_per_position": list(self.drafted_per_position),
            "cut_drafts": self.cut_drafts,
            "mean_acceptance_length": self.mean_acceptance_length,
            "target_calls": self.target_calls,
            "decode_tokens": self.decode_tokens,
            "tokens_per_target_call": self.tokens_per_target_call,
            "tokens_per_step_histogram": list(self.tokens_per_step_histogram),
            "drafts_per_step_histogram": list(self.drafts_per_step_histogram),
            "by_context": {
                str(low): {"target_calls": calls, "tokens": tokens}
                for low, (calls, tokens) in sorted(self.by_context.items())
            },
        }

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts; 1 without drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def tokens_per_target_call(self) -> float:
        """Tokens per sequence and decode-only step, bonus included; 0 before the first."""
        return self.decode_tokens / self.target_calls if self.target_calls else 0.0


def context_bucket(context: int) -> int:
    """Lower bound of the bucket that holds a context of so many tokens: 0, 256, 512, 1024, …"""
    above = bisect_right(CONTEXT_EDGES, context)
    return CONTEXT_EDGES[above - 1] if above else 0


def _count(counts: list[int], index: int, amount: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += amount
