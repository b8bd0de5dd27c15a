"""An acceptance report in the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ..inference import breakdowns
from ..inference.plots import unconditional
from ..inference.tables import main_runs, verdicts
from .app import Invocation


def show(report: dict[str, Any], invocation: Invocation) -> None:
    """The report for a terminal: a table for each dtype and temperature, then the verdicts."""
    settings = dict.fromkeys((run["dtype"], run["temperature"]) for run in report["runs"])
    for dtype, temperature in settings:
        shown = Table(
            *(
                "prompts",
                "drafter",
                "K",
                "tok/call",
                "per position",
                "tok/s",
                "speed-up",
                "= plain",
                "ties",
            ),
            title=f"{dtype}, temperature {temperature:g}",
            title_justify="left",
            box=None,
            pad_edge=False,
            header_style="bold",
        )
        for column in shown.columns[2:]:
            column.justify = "right"
        for run in report["runs"]:
            if (run["dtype"], run["temperature"]) == (dtype, temperature):
                shown.add_row(*_row(run))
        invocation.console.print(shown)
    invocation.say(
        "[dim]tok/call: tokens per target call, bonus included; per position: % of drafts accepted "
        "up to there; = plain: "
        "greedy output equal to plain decoding, near ties aside[/]"
    )
    main = main_runs(report["runs"])
    for title, found in (
        ("tok/call by context", breakdowns.by_context(main)),
        ("tok/call by temperature", breakdowns.by_temperature(main)),
    ):
        if len(breakdowns.places(found)) > 1:
            header, rows = breakdowns.table(found)
            shown = Table(*header, title=title, title_justify="left", box=None, pad_edge=False)
            for row in rows:
                shown.add_row(*row)
            invocation.console.print(shown)
    for line in verdicts(report["runs"]):
        invocation.say(f"- {line}")


def _row(run: dict[str, Any]) -> list[str]:
    return [
        run["prompts"],
        run["drafter"],
        str(run["draft_tokens"] or ""),
        f"{run['tokens_per_target_call']:.3f}",
        " ".join(f"{100 * share:.0f}" for share in unconditional(run)),
        f"{run['tokens_per_second']:.1f}",
        f"{run['speedup']:.2f}×",
        {True: "yes", False: "NO", None: ""}[run["identical_to_plain"]],
        str(run["near_ties"] or ""),
    ]
