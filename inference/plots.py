"""The figures of an acceptance report, drawn without a display.

Each function takes plain report entries (see `report.py`) or metric rows and returns a `Figure`, or
None when there is nothing to draw. A colour belongs to a drafter in every figure; where runs of one
drafter differ in temperature, dtype, batch or number of drafts, the label says how.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

Run = dict[str, Any]
Metric = dict[str, Any]

COLOURS = {"none": "#8b929c", "ngram": "#d9900a", "mtp": "#2456c8", "untrained": "#b9a3d6"}
OTHERS = ("#0f8a6c", "#b03a5b", "#6b4fbb", "#4f6d7a")
ACTIVITIES = {
    "prefill": "#7d8fb3",
    "verify": "#2456c8",
    "draft": "#d9900a",
    "refill": "#0f8a6c",
    "sample": "#b03a5b",
    "other": "#c3c8cf",
}
_WIDTH = 3.5  # inches of one panel
INK, FAINT = "#1d2330", "#e4e7eb"
_QUALIFIERS = (("temperature", "T="), ("draft_tokens", "K="), ("dtype", ""), ("batch", "batch "))


def labels(runs: Sequence[Run]) -> list[str]:
    """One label per run: the drafter, and only those settings in which runs of that drafter
    differ."""
    named = []
    for run in runs:
        peers = [peer for peer in runs if peer["drafter"] == run["drafter"]]
        parts = [str(run["drafter"])]
        for key, prefix in _QUALIFIERS:
            values = {str(peer.get(key)) for peer in peers}
            if len(values) > 1 and run.get(key) is not None:
                parts.append(f"{prefix}{number(run[key])}")
        named.append(" ".join(parts))
    return named


def number(value: Any) -> str:
    """A setting as a reader writes it: 1.0 as 1."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def by_prompts(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs grouped by prompt set, both in the order in which they were measured."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(str(run["prompts"]), []).append(run)
    return groups


def unconditional(run: Run) -> list[float]:
    """Share of drafts whose first i tokens were all accepted, for i = 1..K:
    accepted_per_position[i] / num_drafts."""
    if not run["num_drafts"]:
        return []
    return [count / run["num_drafts"] for count in run["accepted_per_position"]]


def conditional(run: Run) -> list[float | None]:
    """Share accepted at position i among drafts accepted up to i-1; None where none got that
    far."""
    accepted = run["accepted_per_position"]
    before = [run["num_drafts"], *accepted]
    return [count / base if base else None for count, base in zip(accepted, before, strict=False)]


def colour(drafter: str, drafters: Sequence[str]) -> str:
    """The drafter's own colour; unknown drafters take further colours in their order of
    appearance."""
    if drafter in COLOURS:
        return COLOURS[drafter]
    unknown = [name for name in dict.fromkeys(drafters) if name not in COLOURS]
    return OTHERS[unknown.index(drafter) % len(OTHERS)]


def acceptance_per_position(runs: Sequence[Run], *, width: float = _WIDTH) -> Figure | None:
    """Unconditional (top) and conditional (bottom) acceptance at each draft position, one column
    per prompt set."""
    drafted = [run for run in runs if run["num_drafts"]]
    if not drafted:
        return None
    groups = by_prompts(drafted)
    figure, axes = panels(2, len(groups), height=2.5, width=width)
    for column, (prompts, members) in enumerate(groups.items()):
        for row, values in enumerate((unconditional, conditional)):
            axis = axes[row][column]
            _grouped_bars(axis, members, drafted, values, first=1)
            axis.set_ylim(0, _headroom(share for run in drafted for share in values(run)))
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            if row == 0:
                axis.set_title(prompts, fontsize=10)
            else:
                axis.set_xlabel("draft position")
    axes[0][0].set_ylabel("accepted up to here,\nof all drafts")
    axes[1][0].set_ylabel("accepted here, of drafts\naccepted so far")
    return finish(figure, "Acceptance per position", legend=axes)


def tokens_per_step(runs: Sequence[Run], *, width: float = _WIDTH) -> Figure | None:
    """How many tokens a step of one sequence emitted (drafts accepted + 1), as a share of its
    steps."""
    drafted = [run for run in runs if run["num_drafts"] and sum(run["tokens_per_step_histogram"])]
    if not drafted:
        return None
    groups = by_prompts(drafted)
    figure, axes = panels(1, len(groups), height=2.9, width=width)

    def shares(run: Run) -> list[float]:
        counts = run["tokens_per_step_histogram"]
        return [count / sum(counts) for count in counts[1:]]

    for column, (prompts, members) in enumerate(groups.items()):
        axis = axes[0][column]
        _grouped_bars(axis, members, drafted, shares, first=1)
        axis.set_ylim(0, _headroom(share for run in drafted for share in shares(run)))
        axis.set_title(prompts, fontsize=10)
        axis.set_xlabel("tokens emitted in a step")
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0][0].set_ylabel("share of steps")
    return finish(figure, "Tokens per step", legend=axes)


def speed(runs: Sequence[Run], *, width: float = _WIDTH) -> Figure | None:
    """Tokens per second as bars, with the speed-up over plain decoding of the same engine written
    beside."""
    if not runs:
        return None
    groups = by_prompts(runs)
    tallest = max(len(members) for members in groups.values())
    figure, axes = panels(1, len(groups), height=0.9 + 0.42 * tallest, width=width)
    drafters = [str(run["drafter"]) for run in runs]
    for column, (prompts, members) in enumerate(groups.items()):
        axis = axes[0][column]
        rates = [run["tokens_per_second"] for run in members]
        rows = list(range(len(members)))
        axis.barh(
            rows,
            rates,
            height=0.66,
            color=[colour(str(run["drafter"]), drafters) for run in members],
        )
        for row, run in zip(rows, members, strict=True):
            times = f"{run['tokens_per_second']:.1f}"
            if run["drafter"] != "none" and run.get("speedup") is not None:
                times += f"  ({run['speedup']:.2f}×)"
            axis.annotate(
                times,
                (run["tokens_per_second"], row),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        _row_names(axis, members, tallest)
        axis.set_xlim(0, max(rates) * 1.5 or 1)
        axis.set_title(prompts, fontsize=10)
        axis.set_xlabel("tokens/s (× plain)")
    return finish(figure, "Speed")


def time_split(runs: Sequence[Run], *, width: float = _WIDTH) -> Figure | None:
    """Where a generated token's milliseconds go, one bar per run."""
    timed = [run for run in runs if run.get("time") and run["tokens"]]
    if not timed:
        return None
    groups = by_prompts(timed)
    tallest = max(len(members) for members in groups.values())
    figure, axes = panels(1, len(groups), height=1.1 + 0.42 * tallest, width=width)
    parts = [part for part in ACTIVITIES if any(run["time"].get(part) for run in timed)]
    for column, (prompts, members) in enumerate(groups.items()):
        axis = axes[0][column]
        rows = list(range(len(members)))
        left = [0.0] * len(members)
        for part in parts:
            widths = [1000 * run["time"].get(part, 0.0) / run["tokens"] for run in members]
            axis.barh(rows, widths, left=left, height=0.66, color=ACTIVITIES[part], label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        _row_names(axis, members, tallest)
        axis.set_title(prompts, fontsize=10)
        axis.set_xlabel("ms per generated token")
    return finish(figure, "Where the time goes", legend=axes)


def _headroom(shares: Iterable[float | None]) -> float:
    """Upper end of an axis of shares, with room for the numbers above the bars."""
    return min(1.08, 1.2 * max((share for share in shares if share), default=1.0))


def _row_names(axis: Axes, members: Sequence[Run], tallest: int) -> None:
    """One named row per run, the first on top, equally high in every panel."""
    axis.set_yticks(range(len(members)), labels(members))
    axis.set_ylim(tallest - 0.5, -0.5)
    axis.grid(axis="x", color=FAINT)
    axis.grid(axis="y", visible=False)
    axis.xaxis.set_major_locator(MaxNLocator(5))


def panels(
    rows: int, columns: int, *, height: float, width: float = _WIDTH
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure and its axes, [rows][columns]; inches of one panel."""
    figure = Figure(figsize=(width * columns, height * rows + 0.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=False)
    for axis in axes.flat:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color("#9aa1ab")
        axis.tick_params(labelsize=8, colors=INK, length=3)
        axis.xaxis.label.set_size(9)
        axis.yaxis.label.set_size(9)
        axis.set_axisbelow(True)
        axis.grid(axis="y", color=FAINT)
    return figure, [list(row) for row in axes]


def _grouped_bars(
    axis: Axes,
    members: Sequence[Run],
    every: Sequence[Run],
    values: Callable[[Run], Sequence[float | None]],
    *,
    first: int,
) -> None:
    """Bars of each run side by side over the positions first, first+1, …; None leaves a gap."""
    drafters = [str(run["drafter"]) for run in every]
    width = 0.82 / len(members)
    longest = max(len(values(run)) for run in members)
    for index, (run, label) in enumerate(zip(members, labels(members), strict=True)):
        offset = (index - (len(members) - 1) / 2) * width
        twins = sum(run["drafter"] == other["drafter"] for other in members[:index])
        shade = 0.65**twins
        for position, value in enumerate(values(run)):
            if value is None:
                continue
            axis.bar(
                first + position + offset,
                value,
                width * 0.94,
                color=colour(str(run["drafter"]), drafters),
                alpha=shade,
                label=label if position == 0 else None,
            )
            axis.annotate(
                f"{100 * value:.0f}",
                (first + position + offset, value),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6.5 if len(members) <= 3 else 5,
                color=INK,
            )
    axis.set_xticks(range(first, first + longest))


def finish(figure: Figure, title: str, *, legend: list[list[Axes]] | None = None) -> Figure:
    """The figure with its title and, given the axes, one legend for all of them."""
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.02, ha="left", color=INK)
    if legend is not None:
        handles: dict[str, Any] = {}
        for row in legend:
            for axis in row:
                for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                    handles.setdefault(label, handle)
        room = 14 * figure.get_figwidth()  # characters of a line
        beside = max(1, min(len(handles), 5, int(room / (max(map(len, handles), default=0) + 6))))
        lines = -(-len(handles) // beside)
        figure.set_figheight(figure.get_figheight() + 0.16 * max(0, lines - 2))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=beside,
            fontsize=8,
            frameon=False,
        )
    return figure


def png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()
