"""Runs of a sweep by the settings that are compared, and the best of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..conf.compose import options
from ..conf.schema import CompareConfig
from ..conf.structured import nearest
from ..inference.tables import cell
from .run_record import RunRecord, below, differing


@dataclass(frozen=True)
class Group:
    """Runs of a sweep that agree in the settings they are grouped by.

    Attributes:
        settings: those settings. runs: all of them. best: the one that is kept, None where none was
            validated. won: the settings in which the group's runs differ, as the best has them.
    """

    settings: dict[str, Any]
    runs: list[RunRecord]
    best: RunRecord | None
    by: str
    won: dict[str, Any]

    def __str__(self) -> str:
        """In a line: how many runs there were, which was best, and the settings that won."""
        count = len(self.runs)
        line = f"{_in_words(self.settings)}: {count} run{'s' if count > 1 else ''}"
        unjudged = sum(record.validation is None for record in self.runs)
        if unjudged:
            line += f", {unjudged} of them not validated"
        if self.best is None or self.best.validation is None:
            return f"{line}; left out"
        line += f"; best {self.by} {self.best.validation[self.by]:.4f}: {self.best.folder}"
        return line + (f" with {_in_words(self.won)}" if self.won else "")

    def to_json(self) -> dict[str, Any]:
        """Folders in place of records."""
        return {
            "settings": self.settings,
            "runs": [str(record.folder) for record in self.runs],
            "by": self.by,
            "best": str(self.best.folder) if self.best else None,
            "won": self.won,
            "told": str(self),
        }


def grouped(records: Sequence[RunRecord], settings: CompareConfig) -> list[Group]:
    """Runs by their values of `compare.group`, in the order in which values first appear, with the
    best of each by `compare.by`.

    Raises:
        ValueError: no run has a setting of that name, or scores that do not compare.
    """
    known = sorted({key for record in records for key in record.settings})
    for name in settings.group:
        if not any(below(key, [name]) for key in known):
            raise ValueError(
                f"compare.group: no run has a setting {name!r}; {nearest(name, [*options()])}"
            )
    scored = {record.scored_in_engine: record for record in records if record.validation}
    if settings.by == "score" and len(scored) > 1:
        raise ValueError(
            f"{scored[True].folder} was scored by tokens per target call, {scored[False].folder} "
            "by its held-out loss: these do not compare; choose compare.by=loss"
        )
    members: dict[str, list[RunRecord]] = {}
    for record in records:
        members.setdefault(repr(_values(record, settings.group)), []).append(record)
    groups = []
    for runs in members.values():
        judged = [record for record in runs if record.validation]
        best = max(judged, key=lambda record: _merit(record, settings.by)) if judged else None
        won = {key: best.settings.get(key) for key in differing(runs)} if best else {}
        groups.append(Group(_values(runs[0], settings.group), runs, best, settings.by, won))
    return groups


def _values(record: RunRecord, names: Sequence[str]) -> dict[str, Any]:
    """The settings of a run that lie below the names it is grouped by."""
    return {key: value for key, value in sorted(record.settings.items()) if below(key, names)}


def _merit(record: RunRecord, by: str) -> float:
    """Higher is better."""
    assert record.validation is not None
    return -record.validation["loss"] if by == "loss" else record.validation["score"]


def _in_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={cell(value)}" for key, value in values.items()) or "all runs"
