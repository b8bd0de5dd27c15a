"""The figure of a comparison: tokens per target call of several runs, and how they were trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .plots import finish, number, panels

Points = Sequence[tuple[float, float]]
_COLOURS = ("#2456c8", "#d9900a", "#0f8a6c", "#b03a5b", "#6b4fbb", "#4f6d7a", "#8b929c", "#a2683a")


def comparison(
    measurements: Mapping[str, Sequence[dict[str, Any]]],
    curves: Mapping[str, Mapping[str, Points]],
) -> Figure | None:
    """Bars with 95 % intervals above, curves over optimiser steps below; None without either.

    Args:
        measurements: run -> its measured trained drafters: `role`, `prompts`, `temperature`,
            `dtype`, `batch`, `draft_tokens`, `tokens_per_target_call`, `interval` (low, high) or
            None. Every setting but the prompts has a panel of its own.
        curves: title of a panel -> run -> points.
    """
    names = list(dict.fromkeys([*measurements, *(run for told in curves.values() for run in told)]))
    colours = dict(zip(names, _palette(len(names)), strict=True))
    settings = settings_of(measurements)
    drawn = {title: told for title, told in curves.items() if any(told.values())}
    wanted = [row for row in (settings, list(drawn)) if row]
    if not wanted:
        return None
    columns = max(map(len, wanted))
    figure, axes = panels(len(wanted), columns, height=3.0, width=4.6)
    if settings:
        for axis, setting in zip(axes[0], settings, strict=False):
            _bars(axis, setting, measurements, colours)
        axes[0][0].set_ylabel("tokens per target call")
    for axis, (title, told) in zip(axes[-1], drawn.items(), strict=False):
        _lines(axis, title, told, colours)
    for row, cells in zip(axes, wanted, strict=True):
        for axis in row[len(cells) :]:
            axis.set_visible(False)
    return finish(figure, "Runs side by side", legend=axes)


def settings_of(measurements: Mapping[str, Sequence[dict[str, Any]]]) -> list[tuple[Any, ...]]:
    """What panels of bars there are: (role, temperature, dtype, batch, K) in order."""
    return list(dict.fromkeys(setting_of(one) for told in measurements.values() for one in told))


def _palette(count: int) -> list[str]:
    """A colour for each run, told apart as long as that is possible."""
    if count <= len(_COLOURS):
        return list(_COLOURS[:count])
    return [to_hex(colormaps["turbo"](place / (count - 1))) for place in range(count)]


def setting_of(one: dict[str, Any]) -> tuple[Any, ...]:
    """That of one measurement."""
    names = ("role", "temperature", "dtype", "batch", "draft_tokens")
    return tuple(one[name] for name in names)


def _bars(
    axis: Axes,
    setting: tuple[Any, ...],
    measurements: Mapping[str, Sequence[dict[str, Any]]],
    colours: Mapping[str, str],
) -> None:
    here = {
        name: {one["prompts"]: one for one in told if setting_of(one) == setting}
        for name, told in measurements.items()
    }
    here = {name: told for name, told in here.items() if told}
    sets = list(dict.fromkeys(prompts for told in here.values() for prompts in told))
    width = 0.82 / len(here)
    for index, (name, told) in enumerate(here.items()):
        offset = (index - (len(here) - 1) / 2) * width
        for place, prompts in enumerate(sets):
            if prompts not in told:
                continue
            value, interval = told[prompts]["tokens_per_target_call"], told[prompts]["interval"]
            low, high = interval or (value, value)
            around = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axis.bar(
                place + offset,
                value,
                width * 0.94,
                color=colours[name],
                yerr=around if interval else None,
                error_kw={"lw": 1, "capsize": 2},
                label=name,
            )
    role, temperature, dtype, batch, draft_tokens = setting
    axis.set_xticks(range(len(sets)), sets)
    axis.set_title(
        f"{role}, T={number(temperature)}, K={draft_tokens}, {dtype}, batch {batch}", fontsize=9
    )


def _lines(axis: Axes, title: str, told: Mapping[str, Points], colours: Mapping[str, str]) -> None:
    for name, points in told.items():
        if points:
            steps, values = zip(*points, strict=True)
            marker = "o" if len(points) <= 40 else None
            axis.plot(steps, values, label=name, color=colours[name], lw=1.5, marker=marker, ms=3)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("optimiser step")
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
