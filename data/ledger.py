"""The ledger of a preparation: every record, turn, token and row is accounted for.

records.read = records.kept + the sum of records.dropped; a record that the file cuts off is counted
as torn, not read. ledger.json holds the counts and names the first 20 of each reason;
dropped.parquet names every record that is not used, unproven.parquet every assistant turn that is
not supervised.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .conversations import Dropped

FORMAT = 2
SAMPLES = 20
DROPPED = pa.schema(
    {"index": pa.int64(), "id": pa.string(), "reason": pa.string(), "message": pa.string()}
)
UNPROVEN = pa.schema(
    {"index": pa.int64(), "id": pa.string(), "turn": pa.int32(), "reason": pa.string()}
)
_GROUP = 4096


class TableWriter:
    """A Parquet table written row by row in flat memory."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []

    def add(self, *row: Any) -> None:
        """Append one row, its values in the schema's order."""
        self._rows.append(row)
        if len(self._rows) == _GROUP:
            self._flush()

    def close(self) -> None:
        """Write what is buffered and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        names = self._schema.names
        rows = [dict(zip(names, row, strict=True)) for row in self._rows]
        self._rows = []
        if rows:
            self._writer.write_table(pa.Table.from_pylist(rows, self._schema))


@dataclass
class Ledger:
    """Counts of one preparation, filled while it runs.

    Attributes:
        dropped_table, unproven_table: of `DROPPED` and `UNPROVEN`.
        template: what the chat template does of its own. form: what the source is, in words.
        repeats: records whose content another one had before. turns: repairs and unproven spans by
            name. rows: train, heldout, truncated, cut_mid_answer, ... tokens: total and supervised
            (all rows), and both again for train and heldout. warnings: what should be looked at,
            with the remedy.
    """

    source: str
    dropped_table: TableWriter
    unproven_table: TableWriter
    template: dict[str, Any] = field(default_factory=dict)
    form: str = ""
    read: int = 0
    torn: int = 0
    kept: int = 0
    repeats: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    turns: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def drop(self, dropped: Dropped, index: int) -> None:
        """Count and name a record that is left out."""
        self.dropped[dropped.reason] += 1
        self.dropped_table.add(index, dropped.id, dropped.reason, dropped.message)
        samples = self.samples.setdefault(dropped.reason, [])
        if len(samples) < SAMPLES:
            sample: dict[str, Any] = {"id": dropped.id, "index": index}
            samples.append({**sample, "message": dropped.message} if dropped.message else sample)

    def name_unproven(self, index: int, id: str, turns: list[tuple[int, str]]) -> None:
        """Name assistant turns (turn, why) of a record that are not supervised."""
        for turn, reason in turns:
            self.unproven_table.add(index, id, turn, reason)

    def count_row(self, split: str, length: int, supervised: int) -> None:
        """Count a row of a split with its tokens."""
        self.rows[split] += 1
        for name, count in (("total", length), ("supervised", supervised)):
            self.tokens[name] += count
            self.tokens[f"{split}_{name}"] += count

    def unproven(self) -> int:
        """Assistant turns that are not supervised."""
        return sum(count for name, count in self.turns.items() if name.startswith("unproven"))

    def close(self) -> None:
        """Make the two tables whole."""
        self.dropped_table.close()
        self.unproven_table.close()

    def to_json(self) -> dict[str, Any]:
        """The content of ledger.json."""
        assert self.read == self.kept + sum(self.dropped.values())
        rows = {"train": 0, "heldout": 0, "truncated": 0, "cut_mid_answer": 0, **self.rows}
        tokens = {"total": 0, "supervised": 0, "on_policy": 0, **dict(sorted(self.tokens.items()))}
        return {
            "format": FORMAT,
            "source": self.source,
            "form": self.form,
            "template": self.template,
            "records": {
                "read": self.read,
                "torn": self.torn,
                "kept": self.kept,
                "repeats": self.repeats,
                "dropped": dict(sorted(self.dropped.items())),
                "dropped_ids": dict(sorted(self.samples.items())),
            },
            "turns": {"unproven": self.unproven(), **dict(sorted(self.turns.items()))},
            "tokens": tokens,
            "rows": dict(sorted(rows.items())),
            "warnings": self.warnings,
        }

    def summary(self) -> str:
        """One sentence of reasons, for messages."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        return f"{self.read} records read, {self.kept} kept" + (
            f", dropped: {reasons}" if reasons else ""
        )
