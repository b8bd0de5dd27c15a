"""The curves of a training run, from the rows of its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .plots import COLOURS, FAINT, OTHERS, finish, panels

Points = list[tuple[float, float]]
Curves = dict[str, dict[str, Points]]


@dataclass(frozen=True)
class _Panel:
    title: str
    ylabel: str
    percent: bool = False


_PANELS = {
    "loss": _Panel("Loss over training", "loss (nats)"),
    "agreement": _Panel("Agreement with the target over training", "agreement", percent=True),
    "acceptance": _Panel("Acceptance in the engine over training", "tokens per target call"),
    "lr": _Panel("Learning rate", "learning rate"),
    "speed": _Panel("Speed of training", "tokens/s"),
}


def training_curves(metrics: Sequence[dict[str, Any]]) -> Curves:
    """The (step, value) points of a training run: `loss`, held-out `agreement` by draft step,
    `acceptance` in the engine by prompt set and temperature, `lr` and `speed`, each a dict of named
    curves.

    The training loss is the soft cross-entropy, as the held-out one is, whatever was trained.
    """
    curves: Curves = {name: {} for name in _PANELS}

    def add(panel: str, name: str, step: float, value: float) -> None:
        curves[panel].setdefault(name, []).append((step, value))

    for row in metrics:
        step = row["step"]
        if row["kind"] == "train":
            add("loss", "training", step, row["cross_entropy"])
            add("lr", "learning rate", step, row["lr"])
            add("speed", "tokens/s", step, row["tokens_per_second"])
            continue
        add("loss", "held out", step, row["loss"])
        for depth, share in enumerate(row["agreement"], 1):
            add("agreement", f"draft {depth}", step, share)
        for prompts, runs in row.get("acceptance", {}).get("runs", {}).items():
            for temperature, run in runs.items():
                name = f"{prompts} T={temperature}"
                add("acceptance", name, step, run["tokens_per_target_call"])
    return curves


def draw(curves: Curves, name: str, *, width: float = 6.4) -> Figure | None:
    """One panel as a figure, inches wide; None where it has no points."""
    if not curves[name]:
        return None
    figure, axes = panels(1, 1, height=3.2 if width > 5 else 2.5, width=width)
    _plot(axes[0][0], curves[name], _PANELS[name])
    return finish(figure, _PANELS[name].title, legend=axes)


def overview(metrics: Sequence[dict[str, Any]]) -> Figure | None:
    """Every panel that has points, below each other in one figure; None where none has."""
    curves = training_curves(metrics)
    names = [name for name in _PANELS if curves[name]]
    if not names:
        return None
    figure, axes = panels(len(names), 1, height=2.4, width=6.8)
    for (axis,), name in zip(axes, names, strict=True):
        _plot(axis, curves[name], _PANELS[name])
        axis.set_title(_PANELS[name].title, fontsize=10, loc="left")
        if len(curves[name]) > 1:
            axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(figure, "Training")


def _plot(axis: Axes, curves: dict[str, Points], panel: _Panel) -> None:
    palette = (COLOURS["mtp"], COLOURS["ngram"], *OTHERS)
    for index, (name, points) in enumerate(curves.items()):
        steps, values = zip(*points, strict=True)
        axis.plot(
            steps,
            values,
            label=name,
            color=palette[index % len(palette)],
            lw=1.7,
            marker="o" if len(points) <= 40 else None,
            ms=3.5,
        )
    axis.set_xlabel("optimiser step")
    axis.set_ylabel(panel.ylabel)
    axis.grid(color=FAINT)
    axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    if panel.percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
