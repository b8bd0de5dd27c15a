"""A picture of what belongs to what in a cached row: token, state, head row and label.

Head row p holds the state h_p and the token x_{p+1}, and predicts x_{p+2}, for which the target's
own word is softmax(lm_head(norm(h_{p+1}))). It is trained where both tokens are the assistant's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from transformers import PreTrainedTokenizerBase

from ..kernels.shift import supervision
from ..models.trunk import Trunk
from .cache import CacheRow

_BEFORE, _AFTER = 3, 9
_INK, _TAUGHT, _PLAIN, _SURE = "#1d2330", "#cfe8d5", "#eceef1", "#2456c8"


@dataclass(frozen=True)
class HeadRow:
    """One head row p in words. `chosen` is the target's first choice for x_{p+2}."""

    position: int
    token: str
    fed: str
    predicts: str
    trained: bool
    chosen: str
    probability: float


def head_rows(
    row: CacheRow, trunk: Trunk, tokenizer: PreTrainedTokenizerBase, boundary: int
) -> list[HeadRow]:
    """The head rows around the beginning of the first answer, some before and some after.

    Args:
        row: its states must hold `boundary` L.
    Returns:
        at most 12 rows; none where the row is shorter than 3 tokens.
    """
    count = len(row.tokens)
    if count < 3:
        return []
    marked = torch.nonzero(row.supervised)[:, 0]
    first = int(marked[0]) - 1 if len(marked) else 0
    begin = max(0, first - _BEFORE)
    end = min(count - 2, first + _AFTER)
    trained = supervision(row.supervised, torch.tensor([0, count]), 1)[0]
    states = row.states[boundary][begin + 1 : end + 1].to(trunk.device, trunk.dtype)
    law = trunk.logits(trunk.norm(states)).float().softmax(-1)
    best = law.max(-1)

    def text(token: int) -> str:
        return repr(str(tokenizer.decode([token])))[1:-1]

    ids = row.tokens.tolist()
    return [
        HeadRow(
            position=p,
            token=text(ids[p]),
            fed=text(ids[p + 1]),
            predicts=text(ids[p + 2]),
            trained=bool(trained[p]),
            chosen=text(int(best.indices[p - begin])),
            probability=float(best.values[p - begin]),
        )
        for p in range(begin, end)
    ]


def draw(rows: list[HeadRow], shift_nll: dict[str, float] | None) -> Figure:
    """Boxes for each head row's parts, trained ones shaded; beside them the likelihood by shift."""
    figure = Figure(figsize=(11, 0.42 * len(rows) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    wide, narrow = figure.subplots(1, 2, width_ratios=(4, 1))
    wide.set_axis_off()
    wide.set_xlim(0, 6)
    wide.set_ylim(len(rows), -1)
    titles = ("p", "x_p  (state h_p)", "fed: x_{p+1}", "predicts: x_{p+2}", "the target says")
    for place, title in zip((0.1, 0.5, 2.0, 3.3, 4.6), titles, strict=True):
        wide.text(place, -0.5, title, fontsize=9, weight="bold", color=_INK)
    for line, row in enumerate(rows):
        fill = _TAUGHT if row.trained else _PLAIN
        box = FancyBboxPatch(
            (0.42, line - 0.36), 5.5, 0.72, boxstyle="round,pad=0.02", fc=fill, ec="none"
        )
        wide.add_patch(box)
        shown = (str(row.position), row.token, row.fed, row.predicts)
        for place, words in zip((0.1, 0.5, 2.0, 3.3), shown, strict=True):
            _write(wide, place, line, words, _INK)
        right = row.chosen == row.predicts
        words = f"{row.chosen[:14]}  {row.probability:.0%}"
        _write(wide, 4.6, line, words, _SURE if right else _INK)
    if shift_nll:
        narrow.bar(list(shift_nll), list(shift_nll.values()), color=_SURE, width=0.6)
        narrow.set_title("nats by shift\n(0 must be lowest)", fontsize=9)
        narrow.spines[["top", "right"]].set_visible(False)
    else:
        narrow.set_axis_off()
    wide.set_title("shaded rows are trained on", fontsize=9, loc="left")
    return figure


def _write(axes, place: float, line: int, words: str, colour: str) -> None:
    # `$` would begin a formula
    axes.text(
        place,
        line,
        words[:18].replace("$", r"\$"),
        fontsize=8.5,
        va="center",
        color=colour,
        family="monospace",
    )
