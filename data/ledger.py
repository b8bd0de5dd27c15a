"""The ledger of a preparation: every record, turn, token and row is accounted for.

records.read = records.kept + the sum of records.dropped; a record that the file cuts off is counted
as torn, not read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .conversations import Dropped

FORMAT = 1
SAMPLES = 20


@dataclass
class Ledger:
    """Counts of one preparation, filled while it runs.

    Attributes:
        turns: repairs and unproven spans by name. rows: train, heldout, truncated, cut_mid_answer,
            ...
        tokens: total and supervised (all rows), and both again for train and heldout.
    """

    source: str
    read: int = 0
    torn: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    turns: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)

    def drop(self, dropped: Dropped, index: int) -> None:
        """Count a record that is left out; the first 20 of each reason are named."""
        self.dropped[dropped.reason] += 1
        samples = self.samples.setdefault(dropped.reason, [])
        if len(samples) < SAMPLES:
            sample: dict[str, Any] = {"id": dropped.id, "index": index}
            samples.append({**sample, "message": dropped.message} if dropped.message else sample)

    def count_row(self, split: str, length: int, supervised: int) -> None:
        """Count a row of a split with its tokens."""
        self.rows[split] += 1
        for name, count in (("total", length), ("supervised", supervised)):
            self.tokens[name] += count
            self.tokens[f"{split}_{name}"] += count

    def to_json(self) -> dict[str, Any]:
        """The content of ledger.json."""
        assert self.read == self.kept + sum(self.dropped.values())
        rows = {"train": 0, "heldout": 0, "truncated": 0, "cut_mid_answer": 0, **self.rows}
        return {
            "format": FORMAT,
            "source": self.source,
            "records": {
                "read": self.read,
                "torn": self.torn,
                "kept": self.kept,
                "dropped": dict(sorted(self.dropped.items())),
                "dropped_ids": dict(sorted(self.samples.items())),
            },
            "turns": dict(sorted(self.turns.items())),
            "tokens": {"total": 0, "supervised": 0, **dict(sorted(self.tokens.items()))},
            "rows": dict(sorted(rows.items())),
        }

    def summary(self) -> str:
        """One sentence of reasons, for messages."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        return f"{self.read} records read, {self.kept} kept" + (
            f", dropped: {reasons}" if reasons else ""
        )
