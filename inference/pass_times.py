"""What each kind of decode-only step took: seconds by how many sequences and rows it had."""

from __future__ import annotations

from statistics import median
from typing import Any

Shape = tuple[int, int]
"""Sequences, and rows that the target's pass verified (one and its drafts for each sequence)."""


class PassTimes:
    """Seconds of decode-only steps, by `Shape` and activity; all are kept, for their medians."""

    def __init__(self) -> None:
        self._seconds: dict[Shape, list[dict[str, float]]] = {}

    def add(self, sequences: int, rows: int, seconds: dict[str, float]) -> None:
        """One step; `seconds` by activity (`EngineMetrics.seconds`), and `step` for all of it."""
        self._seconds.setdefault((sequences, rows), []).append(seconds)

    def to_json(self) -> list[dict[str, Any]]:
        """By shape: `sequences`, `rows`, `count` of its steps, and the `median` seconds of each
        activity and of the whole `step`; sorted."""
        found = []
        for (sequences, rows), steps in sorted(self._seconds.items()):
            names = sorted({name for one in steps for name in one})
            middle = {name: median(one.get(name, 0.0) for one in steps) for name in names}
            shape = {"sequences": sequences, "rows": rows, "count": len(steps)}
            found.append({**shape, "median": middle})
        return found
