"""Every drafter of docs/comparisons.md on every set and temperature: all that was counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..inference.report import markdown_table


def matrix(accepted: Sequence[dict[str, Any]]) -> str:
    """One line a drafter, set and temperature, from the lines of OUT/acceptance.jsonl.

    Tokens per target call count the call's own token, accepted drafts do not: both conventions of
    the literature. Positions are unconditional shares of the calls that had drafts (of a tree's
    levels where it is one); buckets of context are tokens per target call by how many tokens lay
    before the call.
    """
    if not accepted:
        return ""
    edges = sorted({int(edge) for record in accepted for edge in record["by_context"]})
    header = ["drafter", "prompts", "T", "tokens a call", "accepted a call", "by position, %"]
    header += [_bucket(edge, edges) for edge in edges]
    rows = [
        [
            record["head"],
            record["prompts"],
            f"{record['temperature']:g}",
            f"{record['tokens_per_target_call']:.3f}",
            f"{record['tokens_per_target_call'] - 1:.3f}",
            " ".join(f"{100 * share:.0f}" for share in _shares(record)),
            *_by_context(record, edges),
        ]
        for record in sorted(accepted, key=lambda r: (r["head"], r["temperature"]))
    ]
    return f"## Every drafter, set and temperature\n\n{markdown_table(header, rows)}\n"


def _shares(record: dict[str, Any]) -> list[float]:
    """Of the calls that had drafts, how many kept each position."""
    drafts = max(record["drafted_per_position"][:1], default=0)
    return [count / drafts for count in record["accepted_per_position"]] if drafts else []


def _by_context(record: dict[str, Any], edges: Sequence[int]) -> Iterator[str]:
    for edge in edges:
        counts = record["by_context"].get(str(edge))
        yield f"{counts['tokens'] / counts['target_calls']:.2f}" if counts else "–"


def _bucket(edge: int, edges: Sequence[int]) -> str:
    further = [other for other in edges if other > edge]
    return f"{edge}–{further[0] - 1} tokens" if further else f"{edge} tokens and more"
