"""The figure of `payoff`: speed-up over batch size, a line for each draft length."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from .payoff import Payoff
from .plots import INK, finish, number, panels


def draw(payoffs: Sequence[Payoff], where: str) -> Figure:
    """A panel for each drafter and temperature. where: the device, or whose times these are."""
    figure, axes = panels(1, len(payoffs), height=3.0, width=4.2)
    for axis, one in zip(axes[0], payoffs, strict=True):
        batches = list(one.speedups)
        longest = len(one.speedups[batches[0]])
        for drafts in range(1, longest + 1):
            axis.plot(
                range(len(batches)),
                [one.speedups[batch][drafts - 1] for batch in batches],
                color=to_hex(colormaps["viridis"](0.9 * (drafts - 1) / max(1, longest - 1))),
                ls="-" if drafts <= one.rates.measured else "--",
                marker="o",
                ms=3,
                lw=1.5,
                label=f"K={drafts}" + ("" if drafts <= one.rates.measured else " (not measured)"),
            )
        axis.axhline(1, color=INK, lw=0.8, ls=":")
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set_xlabel("sequences that decode together")
        axis.set_title(f"{one.rates.drafter}, T={number(one.rates.temperature)}", fontsize=10)
    axes[0][0].set_ylabel("speed-up over plain decoding")
    return finish(figure, f"When drafting pays: {where}", legend=axes)
