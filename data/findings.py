"""What an examination says: one finding for each check, the same form for every subject."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

_LOW_COVERAGE, _HIGH_COVERAGE = 0.05, 0.99


@dataclass(frozen=True)
class Finding:
    """One check's outcome. `told` says what was looked at and the number; `remedy` what to do."""

    check: str
    verdict: Literal["ok", "note", "fault"]
    told: str
    remedy: str = ""


def faults_of(findings: Iterable[Finding]) -> list[Finding]:
    """Those that must be mended before anything is learnt or concluded."""
    return [finding for finding in findings if finding.verdict == "fault"]


def mask_finding(supervised: int, tokens: int, idle: list[str], rows: int) -> Finding:
    """How much of some rows teaches.

    Args:
        supervised, tokens: counts over all rows. idle: names of rows that teach nothing. rows: R.
    """
    share = supervised / max(tokens, 1)
    told = (
        f"{share:.1%} of {tokens:,} tokens supervised, {len(idle)} of {rows:,} rows teach nothing"
    )
    if len(idle) == rows:
        return Finding("mask", "fault", told, "prepare again: no answer is marked in any row")
    if share > _HIGH_COVERAGE:
        return Finding(
            "mask", "fault", told, "prompts are supervised too: prepare with the target's template"
        )
    if share < _LOW_COVERAGE or len(idle) > rows // 10:
        where = f" (first: {', '.join(idle[:3])})" if idle else ""
        remedy = "look at `draftsmith prepare --show 3`; raise data.rows.max_length"
        return Finding("mask", "note", told + where, remedy)
    return Finding("mask", "ok", told)
