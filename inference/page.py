"""One HTML file that needs nothing beside it: tables, and figures as SVG, on any screen, light or
dark."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

PANEL = 3.6
"""Inches of a figure's width that fill a telephone's screen and still read well there."""
_DARK = {
    "#2456c8": "#7aa2ff",
    "#d9900a": "#f0b040",
    "#0f8a6c": "#3fc9a3",
    "#b03a5b": "#f07f9f",
    "#6b4fbb": "#ad94f5",
    "#4f6d7a": "#93b3c2",
    "#8b929c": "#a0a7b2",
    "#b9a3d6": "#c9b6e4",
    "#7d8fb3": "#93a6cf",
    "#c3c8cf": "#5c636e",
    "#a2683a": "#d59b6c",
    "#e4e7eb": "#343a44",
    "#9aa1ab": "#6d7480",
}
"""The figures' colours, and what each is on a dark screen."""
_INK = ("#1d2330", "#000000")


def page(title: str, blocks: Sequence[str]) -> str:
    """The whole file. blocks: HTML, see the functions below."""
    light = "".join(f"--c{colour[1:]}: {colour}; " for colour in _DARK)
    dark = "".join(f"--c{colour[1:]}: {other}; " for colour, other in _DARK.items())
    style = _STYLE.replace("{light}", light).replace("{dark}", dark)
    return _PAGE.format(title=html.escape(title), style=style, body="\n".join(blocks))


def heading(text: str) -> str:
    """A title of the second rank."""
    return f"<h2>{html.escape(text)}</h2>"


def sentences(lines: Sequence[str]) -> str:
    """A list of them; nothing of none."""
    if not lines:
        return ""
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def definitions(terms: dict[str, str]) -> str:
    """What each name means."""
    told = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in terms.items()
    )
    return f"<dl>{told}</dl>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Where it is wider than the screen it scrolls by itself, and its first column stays."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    rows_of = f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody>"
    return f'<div class="wide" tabindex="0"><table>{rows_of}</table></div>'


def folded(title: str, block: str, opened: bool = False) -> str:
    """A block behind its title, opened by a touch, or open at first."""
    tag = "details open" if opened else "details"
    return f"<{tag}><summary>{html.escape(title)}</summary>{block}</details>"


def panels(figures: Sequence[tuple[str, Figure]]) -> str:
    """Figures beside each other where there is room, each with what it shows in words."""
    told = "".join(f"<figure>{svg(figure, label)}</figure>" for label, figure in figures)
    return f'<div class="panels">{told}</div>'


def svg(figure: Figure, label: str) -> str:
    """A figure as an SVG element: letters stay letters, ink is the page's own, and the colours
    follow the screen's."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "draftsmith"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:xmlns(?::\w+)?|width|height|version)="[^"]*"', "", text, count=5)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # they would stand in the page several times
    for colour in _INK:
        text = text.replace(colour, "currentColor")
    for colour in _DARK:
        text = text.replace(colour, f"var(--c{colour[1:]})")
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
    return re.sub(r"\n\s*", "\n", text)


_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2330; --soft: #5a6270; --line: #e4e7eb;
 --head: #f5f6f8; --kept: #d5f2e3; --lost: #b3261e; --bonus: #1d4fd8; {light} }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e6e8ec; --soft: #a2a9b4;
 --line: #343a44; --head: #1e232b; --kept: #14523a; --lost: #ff9c93; --bonus: #9dbbff; {dark} } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--ink); background: var(--paper);
 font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2rem; }
h3 { font-size: 1rem; margin-bottom: .3rem; } ul { padding-left: 1.2rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; }
th { background: var(--head); vertical-align: bottom; } td { vertical-align: top; }
td { white-space: nowrap; } td:last-child { white-space: normal; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
th:first-child { background: var(--head); }
.panels { display: grid; gap: 1rem; align-items: start;
 grid-template-columns: repeat(auto-fill, minmax(min(100%, 20.5rem), 1fr)); }
figure { margin: 0; } figure svg { display: block; width: 100%; height: auto; max-width: 30rem; }
svg text { fill: currentColor; font-family: system-ui, sans-serif !important; }
dt { font-weight: 600; margin-top: .6rem; } dd { margin: 0; }
summary { font-weight: 600; cursor: pointer; padding: .4rem 0; }
.note { color: var(--soft); font-size: .9rem; margin: .3rem 0; }
.drafted { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
 padding: .2rem 0 .2rem .8rem; margin: .5rem 0 1rem; line-height: 1.7; }
.kept { background: var(--kept); text-decoration: underline; text-underline-offset: .25em;
 border-radius: .2em; }
.lost { color: var(--lost); font-size: .85em; }
.bonus { color: var(--bonus); text-decoration: underline dotted; text-underline-offset: .25em; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
