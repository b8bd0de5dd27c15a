"""Tokens per target call by context and by temperature: counts of all prompt sets together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from .plots import INK, colour, finish, labels, number, panels

Run = dict[str, Any]
Counts = tuple[int, int]
"""Target calls, and the tokens they gave."""
Breakdown = dict[str, dict[str, Counts]]
"""Drafter (with what tells its runs apart) -> place -> counts."""


def by_context(runs: Sequence[Run]) -> Breakdown:
    """Places are buckets of the tokens that stood before a step: `0–255`, `256–511`, …"""
    found: Breakdown = {}
    edges = sorted({int(low) for run in runs for low in run.get("by_context") or ()})
    for low in edges:
        for run, label in zip(runs, labels(runs), strict=True):
            counts = (run.get("by_context") or {}).get(str(low))
            if counts is not None:
                name = f"{low}–{max(2 * low, 256) - 1}"
                _add(found, label, name, counts["target_calls"], counts["tokens"])
    return found


def by_temperature(runs: Sequence[Run]) -> Breakdown:
    """Places are temperatures; empty where all runs have one."""
    found: Breakdown = {}
    warmths = sorted({run["temperature"] for run in runs})
    if len(warmths) < 2:
        return found
    named = labels([{**run, "temperature": 0} for run in runs])
    for warmth in warmths:
        for run, label in zip(runs, named, strict=True):
            if run["temperature"] == warmth and "decode_tokens" in run:
                counts = run["target_calls"], run["decode_tokens"]
                _add(found, label, f"T={number(warmth)}", *counts)
    return found


def _add(found: Breakdown, label: str, place: str, calls: int, tokens: int) -> None:
    before = found.setdefault(label, {}).get(place, (0, 0))
    found[label][place] = (before[0] + calls, before[1] + tokens)


def places(breakdown: Breakdown) -> list[str]:
    """In their order."""
    return list(dict.fromkeys(place for counts in breakdown.values() for place in counts))


def table(breakdown: Breakdown) -> tuple[list[str], list[list[str]]]:
    """Header and rows: tokens per target call, and how many calls it is the mean of."""
    rows = []
    for label, counts in breakdown.items():
        cells = []
        for place in places(breakdown):
            calls, tokens = counts.get(place, (0, 0))
            cells.append(f"{tokens / calls:.3f} ({calls:,})" if calls else "-")
        rows.append([label, *cells])
    return ["drafter", *places(breakdown)], rows


def draw(breakdown: Breakdown, title: str, xlabel: str, *, width: float = 5.0) -> Figure | None:
    """Bars side by side; None where there is nothing, or plain decoding alone."""
    drafted = {label: counts for label, counts in breakdown.items() if label.split()[0] != "none"}
    if not drafted:
        return None
    figure, axes = panels(1, 1, height=2.5, width=width)
    axis, names = axes[0][0], places(drafted)
    drafters = [label.split()[0] for label in drafted]
    bar = 0.82 / len(drafted)
    for index, (label, counts) in enumerate(drafted.items()):
        shade = max(0.25, 0.65 ** drafters[:index].count(drafters[index]))
        for place, name in enumerate(names):
            calls, tokens = counts.get(name, (0, 0))
            if not calls:
                continue
            at = place + (index - (len(drafted) - 1) / 2) * bar
            hue = colour(drafters[index], drafters)
            axis.bar(at, tokens / calls, bar * 0.94, color=hue, alpha=shade, label=label)
            axis.annotate(
                f"{tokens / calls:.2f}",
                (at, tokens / calls),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
                rotation=90 if bar * len(names) < 0.6 else 0,
                color=INK,
            )
    axis.axhline(1, color=INK, lw=0.8, ls=":")
    axis.set_ylim(0, 1.2 * max(t / c for told in drafted.values() for c, t in told.values() if c))
    axis.set_xticks(range(len(names)), names)
    axis.set_xlabel(xlabel)
    axis.set_ylabel("tokens per target call")
    return finish(figure, title, legend=axes)
