"""An acceptance report as files: `report.json`, `report.md`, `report.html` and the figures as PNG.

`report.json` holds the report as it was measured and nothing else; every other file is derived from
it and from the metric rows of the training run. Each number is printed with its definition
(`DEFINITIONS`). The HTML file carries its figures inside, as SVG, and loads nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..models.files import atomic_write_bytes, atomic_write_json, atomic_write_text
from . import breakdowns, page, plots
from .curves import draw, training_curves
from .tables import (
    BASELINES,
    cell,
    comparable,
    counts,
    differences,
    main_runs,
    setting,
    table,
    verdicts,
)

Run = dict[str, Any]

SECTIONS = ("target", "head", "draft_lm", "data", "settings", "provenance")
"""What a report says about itself beside its runs, in reading order."""

DEFINITIONS = {
    "tokens per target call": (
        "decode_tokens / target_calls: tokens per forward pass of the target and sequence, "
        "counted over decode-only steps. The bonus token, which the target adds to every "
        "verified draft, is included; the first token of an answer, which comes from its "
        "prompt's prefill, is not; nothing after an end token counts. Plain decoding is 1."
    ),
    "mean acceptance length": (
        "1 + num_accepted_tokens / num_drafts, bonus included. A draft is one proposal of up to"
        " K tokens for one sequence; drafts that the token limit or an end token cut short are "
        "left out here (cut_drafts), and steps without a draft never enter, so it differs from "
        "tokens per target call."
    ),
    "accepted / drafted": "num_accepted_tokens / num_draft_tokens, bonus excluded.",
    "accepted per position": (
        "accepted_per_position[i] / num_drafts, unconditional: the share of all drafts whose "
        "first i tokens were accepted."
    ),
    "conditional": (
        "accepted_per_position[i] / accepted_per_position[i-1]: the share accepted at position "
        "i among the drafts accepted up to the position before."
    ),
    "by context, by temperature": (
        "tokens per target call of all prompt sets together (in brackets the target calls it is "
        "the mean of), by the tokens that stood before the step, or by temperature; the runs of "
        "the first dtype and batch."
    ),
    "tokens/s": "generated tokens of all answers / wall seconds, prefill included.",
    "speed-up": (
        "tokens/s / tokens/s of the same engine without drafts on the same prompts, "
        "temperature, dtype and batch."
    ),
    "identical to plain": (
        "greedy output against plain decoding, token by token. yes: equal, or first different "
        "at a near tie; NO: some difference is not explained by the dtype; -: not compared "
        "(sampled, or plain itself)."
    ),
    "near ties": (
        "answers that first differ where the plain run's two largest logits were closer than "
        "rounding in the dtype can move them. Each is listed with its gap and that bound."
    ),
    "seconds": (
        "prefill: passes over prompts; draft: proposing tokens; verify: the target's passes "
        "over drafts (over one token where none was drafted); sample: accepting and sampling; "
        "refill: the head's keys and values from true target states; other: scheduling and "
        "bookkeeping."
    ),
}


def render(
    report: dict[str, Any], metrics: Sequence[dict[str, Any]], out: Path | str
) -> list[Path]:
    """Write every file of a report.

    Args:
        report: `SECTIONS` (JSON values, shown as they are) and `runs`, a
            list of entries as `acceptance.RunResult.to_json` gives them.
        metrics: rows of the training run's `metrics.jsonl`, oldest first; may be empty. Read are
            `kind`, `step`, `loss` and, of validations, `agreement` per step and `acceptance` in the
            engine.
        out: folder to write into; made when absent.

    Returns:
        the paths written, `report.json` first.

    Raises:
        ValueError: `report` has no runs.
    """
    out = Path(out)
    report = _finite(report)
    runs: list[Run] = report["runs"]
    if not runs:
        raise ValueError(
            "the report holds no runs: ask for at least one drafter and one prompt set"
        )
    images = {name: plots.png(figure) for name, figure in figures(runs, metrics).items()}
    written = [out / "report.json"]
    atomic_write_json(written[0], report)
    for name, data in images.items():
        written.append(out / f"{name}.png")
        atomic_write_bytes(written[-1], data)
    written.append(out / "report.md")
    atomic_write_text(written[-1], to_markdown(report, list(images)))
    written.append(out / "report.html")
    atomic_write_text(written[-1], to_html(report, metrics))
    return written


def figures(runs: Sequence[Run], metrics: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    """The figures there is something to draw for, by file name without its ending, in reading
    order."""
    curves = training_curves(metrics)
    drawn = {
        "speed": plots.speed(runs),
        "acceptance_per_position": plots.acceptance_per_position(runs),
        "tokens_per_step": plots.tokens_per_step(runs),
        "time": plots.time_split(runs),
        **{f"training_{name}": draw(curves, name) for name in ("loss", "agreement", "acceptance")},
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def to_markdown(report: dict[str, Any], images: Sequence[str]) -> str:
    """The report as Markdown; figures are linked by the file names beside it."""
    blocks = ["# Acceptance report", "\n".join(f"- {line}" for line in verdicts(report["runs"]))]
    blocks.append(markdown_table(*table(report["runs"])))
    blocks += [f"![{name.replace('_', ' ')}]({name}.png)" for name in images]
    main = main_runs(report["runs"])
    for title, found in (
        ("By context", breakdowns.by_context(main)),
        ("By temperature", breakdowns.by_temperature(main)),
    ):
        if found:
            blocks += [f"## {title}", markdown_table(*breakdowns.table(found))]
    blocks += ["## Counts and seconds", markdown_table(*counts(report["runs"]))]
    header, rows = differences(report["runs"])
    if rows:
        blocks += ["## First differences from plain decoding", markdown_table(header, rows)]
    blocks += [
        "## Definitions",
        "\n".join(f"- **{name}**: {text}" for name, text in DEFINITIONS.items()),
    ]
    blocks.append("## What was measured")
    for section in SECTIONS:
        if report.get(section):
            blocks.append(markdown_table([section, "value"], _flatten(report[section])))
    return "\n\n".join(block for block in blocks if block) + "\n"


def to_html(report: dict[str, Any], metrics: Sequence[dict[str, Any]]) -> str:
    """The report as one HTML file that needs nothing beside it and reads well on a narrow
    screen."""
    runs: list[Run] = report["runs"]
    blocks = [page.sentences(verdicts(runs)), page.table(*table(runs))]
    main = main_runs(runs)
    groups = comparable(main)
    for title, panel in _PANELS.items():
        drawn = [(setting(group[0], runs), panel(group)) for group in groups]
        shown = [(f"{title}: {told}", _bare(one, told)) for told, one in drawn if one is not None]
        if shown:
            blocks += [page.heading(title), page.panels(shown)]
    blocks += _broken_down(main)
    blocks += _drafted(runs)
    curves = training_curves(metrics)
    drawn = [(name, draw(curves, name, width=page.PANEL)) for name in _CURVES]
    shown = [(f"{name} over training", _bare(one, name)) for name, one in drawn if one is not None]
    if shown:
        blocks += [page.heading("Training"), page.panels(shown)]
    blocks += [page.heading("Counts and seconds"), page.table(*counts(runs))]
    header, rows = differences(runs)
    if rows:
        blocks += [page.heading("First differences from plain decoding"), page.table(header, rows)]
    blocks += [page.heading("Definitions"), page.definitions(DEFINITIONS)]
    blocks.append(page.heading("What was measured"))
    for section in SECTIONS:
        if report.get(section):
            told = page.table([section, "value"], _flatten(report[section]))
            blocks.append(page.folded(section, told))
    return page.page("Acceptance report", blocks)


_CURVES = ("loss", "agreement", "acceptance")
_PANELS: dict[str, Callable[[list[Run]], Figure | None]] = {
    "Speed": lambda runs: plots.speed(runs, width=page.PANEL),
    "Acceptance per position": lambda runs: plots.acceptance_per_position(runs, width=page.PANEL),
    "Tokens per step": lambda runs: plots.tokens_per_step(runs, width=page.PANEL),
    "Where the time goes": lambda runs: plots.time_split(runs, width=page.PANEL),
}
"""Figures of one prompt set at one temperature."""


def _bare(figure: Figure, title: str) -> Figure:
    """A figure that says its setting in place of its title, which stands above it on the page."""
    figure.suptitle("")
    figure.axes[0].set_title(title, fontsize=10)
    return figure


def _broken_down(runs: Sequence[Run]) -> list[str]:
    """Tokens per target call by context, at each temperature, and by temperature."""
    warmths = dict.fromkeys(run["temperature"] for run in runs)
    contexts = {
        f"all prompts, temperature {cell(warmth)}": breakdowns.by_context(
            [run for run in runs if run["temperature"] == warmth]
        )
        for warmth in warmths
    }
    by_temperature = breakdowns.by_temperature(runs)
    told = {
        "By context": ("tokens before the step", contexts, breakdowns.by_context(runs)),
        "By temperature": (
            "temperature",
            {"all prompts": by_temperature},
            by_temperature,
        ),
    }
    blocks = []
    for title, (xlabel, parts, whole) in told.items():
        shown = []
        for told_of, found in parts.items():
            figure = breakdowns.draw(found, title, xlabel, width=page.PANEL)
            if figure is not None and len(breakdowns.places(whole)) > 1:
                shown.append((f"{title}: {told_of}", _bare(figure, told_of)))
        if whole:
            blocks += [page.heading(title), page.panels(shown) if shown else ""]
            blocks.append(page.table(*breakdowns.table(whole)))
    return blocks


def _drafted(runs: Sequence[Run]) -> list[str]:
    """Answers with their drafts: kept, lost, and what the target said."""
    shown = [(run, text) for run in runs for text in run.get("texts") or ()]
    if not shown:
        return []
    blocks = [
        page.heading("Drafted text"),
        '<p class="note"><span class="kept">accepted drafts</span> are underlined, '
        '<span class="lost">[<s>rejected ones</s>]</span> struck through in brackets before the '
        'token that the target put in their place; the <span class="bonus">bonus token</span> '
        "behind a wholly accepted draft has a dotted line; plain text was not drafted.</p>",
    ]
    named = {id(run): label for run, label in zip(runs, plots.labels(runs), strict=True)}
    first = _first_head(shown)
    for place, (run, text) in enumerate(shown):
        title = f"{named[id(run)]}, {text['prompts']}, {text['id']}"
        prompt = f'<p class="note drafted">{html.escape(text["prompt"])}</p>'
        answer = "".join(_round(one) for one in text["rounds"])
        block = f'{prompt}<p class="drafted">{answer}</p>'
        blocks.append(page.folded(title, block, opened=place == first))
    return blocks


def _first_head(shown: Sequence[tuple[Run, Any]]) -> int:
    """Which text is open at first: that of the trained drafter with the most tokens per call."""
    ranked = [
        (run["drafter"] not in BASELINES, run["tokens_per_target_call"], -run["draft_tokens"])
        for run, _ in shown
    ]
    return ranked.index(max(ranked))


def _round(one: dict[str, str]) -> str:
    accepted, target, rejected = (
        html.escape(one[name]) for name in ("accepted", "target", "rejected")
    )
    words = f'<span class="kept">{accepted}</span>' if accepted else ""
    if rejected:
        lost = rejected.replace("\n", "↵")
        return f'{words}<span class="lost">[<s>{lost}</s>]</span>{target}'
    return words + (f'<span class="bonus">{target}</span>' if words and target else target)


def _finite(value: Any) -> Any:
    """JSON has no infinity (an answer that merely goes on has an infinite gap): null stands for
    it."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flatten(value: Any, prefix: str = "") -> list[list[str]]:
    """Nested JSON as rows of (dotted key, value)."""
    if isinstance(value, dict) and value:
        return [
            row
            for key, inner in value.items()
            for row in _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else cell(value)
    return [[prefix, text]]


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return (
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        )

    return "\n".join([line(header), "|" + " --- |" * len(header), *map(line, rows)])
