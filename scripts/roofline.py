"""The least time that each op can take on a card: bytes over bandwidth or arithmetic over its peak,
whichever is longer.

`op_calls` says what is counted. Both are lower bounds: a launch, an imperfect cache and the tails
of a grid come on top.

    python -m draftsmith.scripts.roofline [docs/kernels.md] [MEASURED.json]
        prints the table, or renews the page; times of a card come from what `gpu_check` wrote
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models.files import read_json
from .aot import renew
from .op_arguments import Size
from .op_calls import Case
from .op_cases import CASES

MARKS = "roofline"


@dataclass(frozen=True)
class Card:
    """Peaks of a card's data sheet: bytes a second, dense bfloat16 and float32 operations a
    second."""

    name: str
    bandwidth: float
    matrix: float
    vector: float


CARDS = (
    Card("H100 SXM", 3.35e12, 989e12, 67e12),
    Card("H200", 4.8e12, 989e12, 67e12),
)


def floor(case: Case, size: Size, card: Card) -> float:
    """Seconds."""
    moved, operations = case.amounts(size)
    return max(moved / card.bandwidth, operations / (card.matrix if case.matrix else card.vector))


def table(measured: dict[str, Any] | None = None) -> str:
    """A Markdown table, one line an op and model.

    Args:
        measured: what `gpu_check` wrote, seconds by `label` and the card; the column is empty
            where there are none.
    """
    times_of: dict[str, float] = measured["seconds"] if measured else {}
    where = f"measured on {measured['card']}" if measured else "measured"
    lines = [
        "| op | workload | widths of | bytes | MB | operations | Gop | bound by "
        + "".join(f"| {card.name}, µs " for card in CARDS)
        + f"| {where}, µs |",
        "|" + "---|" * (9 + len(CARDS)),
    ]
    for case in CASES:
        for index, size in enumerate(case.sizes):
            moved, operations = case.amounts(size)
            peak = CARDS[0].matrix if case.matrix else CARDS[0].vector
            bound = "memory" if moved / CARDS[0].bandwidth >= operations / peak else "arithmetic"
            head, formula = ["", "", size.name, ""], ""
            if index == 0:
                head = [f"`{case.op}`", case.title, size.name, f"`{case.bytes}`"]
                formula = f"`{case.operations}`"
            times = [f"{1e6 * floor(case, size, card):.3g}" for card in CARDS]
            seconds = times_of.get(label(case, size))
            times.append("" if seconds is None else f"{1e6 * seconds:.3g}")
            cells = [*head, f"{moved / 1e6:.4g}", formula, f"{operations / 1e9:.4g}", bound, *times]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def label(case: Case, size: Size) -> str:
    """How a measured time names its case."""
    return f"{case.op} @ {size.name}"


def main(arguments: list[str]) -> int:
    """Print the table, or renew it in the page that is named."""
    named = {Path(word).suffix: Path(word) for word in arguments}
    measured = read_json(named[".json"]) if ".json" in named else None
    text = table(measured)
    if ".md" in named:
        renew(named[".md"], MARKS, text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
