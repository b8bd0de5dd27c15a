"""An acceptance report as files: `report.json`, `report.md`, `report.html` and the figures as PNG.

`report.json` holds the report as it was measured and nothing else; every other file is derived from
it and from the metric rows of the training run. Each number is printed with its definition
(`DEFINITIONS`). The HTML file carries its figures inside and loads nothing.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..models.files import atomic_write_bytes, atomic_write_json, atomic_write_text
from . import plots
from .curves import draw, training_curves
from .tables import cell, counts, differences, table, verdicts

Run = dict[str, Any]

SECTIONS = ("target", "head", "draft_lm", "data", "settings")
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
    atomic_write_text(written[-1], to_html(report, images))
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


def to_html(report: dict[str, Any], images: dict[str, bytes]) -> str:
    """The report as one HTML file that needs nothing beside it and reads well on a narrow
    screen."""
    runs = report["runs"]
    body = ["<h1>Acceptance report</h1>"]
    body.append(
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in verdicts(runs)) + "</ul>"
    )
    body.append(_html_table(*table(runs)))
    for name, data in images.items():
        source = base64.b64encode(data).decode("ascii")
        title = html.escape(name.replace("_", " "))
        width = int.from_bytes(data[16:20], "big")  # of the PNG's header, in pixels
        kind = ' class="panels"' if width > 1000 else ""
        body.append(
            f'<figure><img{kind} alt="{title}" src="data:image/png;base64,{source}"></figure>'
        )
    body += ["<h2>Counts and seconds</h2>", _html_table(*counts(runs))]
    header, rows = differences(runs)
    if rows:
        body += ["<h2>First differences from plain decoding</h2>", _html_table(header, rows)]
    terms = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>"
        for name, text in DEFINITIONS.items()
    )
    body += ["<h2>Definitions</h2>", f"<dl>{terms}</dl>", "<h2>What was measured</h2>"]
    for section in SECTIONS:
        if report.get(section):
            body.append(_html_table([section, "value"], _flatten(report[section])))
    return _PAGE.replace("{body}", "\n".join(body))


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


def _html_table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    rows_of = f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody>"
    return f'<div class="wide"><table>{rows_of}</table></div>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Acceptance report</title>
<style>
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; color: #1d2330; background: #fff; }
body { font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #e4e7eb; text-align: left; }
th { background: #f5f6f8; } td { vertical-align: top; white-space: nowrap; }
figure { margin: 1rem 0; overflow-x: auto; } img { max-width: 100%; height: auto; }
@media (max-width: 45rem) { img.panels { max-width: none; width: 48rem; } }
dt { font-weight: 600; margin-top: .6rem; } dd { margin: 0; }
</style>
</head>
<body>
{body}
</body>
</html>
"""
