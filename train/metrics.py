"""metrics.jsonl: one JSON object a line, `kind` train or validation, in the order of `step`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..models.files import atomic_write_text


class MetricsFile:
    """Appends lines; each is on its way to the disk before the next step begins.

    Args:
        path: the file; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add one line. Raises ValueError where the record holds NaN or an infinity."""
        line = json.dumps(record, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def truncate_after(self, step: int, *, validated: bool = True) -> int:
        """Drop lines past optimiser step `step` and a torn last line; returns how many lines went.

        A run that is resumed from step S repeats what came after S, so the lines of the first try
        must go; without `validated` it repeats the validation of S as well.
        """
        if not self.path.exists():
            return 0
        lines = self.path.read_text(encoding="utf-8").splitlines()
        limits = {"train": step, "validation": step if validated else step - 1}
        records = read_metrics(self.path)
        kept = [json.dumps(r) for r in records if r["step"] <= limits[r["kind"]]]
        if len(kept) < len(lines):
            atomic_write_text(self.path, "".join(line + "\n" for line in kept))
        return len(lines) - len(kept)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file; a torn last line (a killed run) is left out.

    Raises:
        ValueError: a damaged line that is not the last, named by its number.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise ValueError(
                f"{path} line {number} is not JSON ({error.msg}); remove that line"
            ) from error


def best_validation(lines: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The line of the highest score, the later of equals, among those that were measured as the
    last was (`basis`): its weights are the head. None where nothing was validated."""
    found = [line for line in lines if line["kind"] == "validation"]
    alike = [line for line in found if line.get("basis") == found[-1].get("basis")]
    return max(alike, key=lambda line: (line["score"], line["step"]), default=None)
