"""What `plan` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ..train.forecast import GB

if TYPE_CHECKING:
    from .plan import Forecast
    from .plan_measured import Beside
    from .plan_payoff import Drafting


def tables(found: Forecast, measured: list[Beside]) -> list[Table]:
    """A forecast in tables: what it is of, memory, disk, time; what a finished run measured; and
    when drafting pays."""
    facts, device = found.facts, found.device
    head = Table("forecast, not measured", "", box=None, pad_edge=False)
    head.add_row("target", f"{escape(facts['target'])}, {facts['target_parameters'] / 1e9:.2f} B")
    head.add_row("its shape from", escape(facts["shape"]))
    head.add_row("head", f"{facts['head']}, {facts['head_parameters']:,} parameters")
    head.add_row("devices", f"{facts['gpus']} x {device.name}, {device.memory / GB:.0f} GB")
    head.add_row("data", f"{facts['tokens']:,} tokens in rows of {facts['row_tokens']:,}")
    head.add_row(
        "a step", f"{facts['tokens_per_step']:,} tokens; {facts['epochs']:.1f} epochs in all"
    )
    memory = Table("memory of a rank, GB", box=None, pad_edge=False)
    for name, one in found.memory.items():
        memory.add_column(f"{name} ({one.moment})", justify="right")
    names = list(dict.fromkeys(part for one in found.memory.values() for part in one.parts))
    for part in names:
        sizes = [one.parts.get(part) for one in found.memory.values()]
        memory.add_row(part, *("" if size is None else f"{size / GB:.2f}" for size in sizes))
    totals = []
    for name, one in found.memory.items():
        colour = "bold red" if name in found.too_much else "green"
        totals.append(f"[{colour}]{one.total / GB:.2f}[/]")
    memory.add_row(f"[bold]of {found.budget / GB:.1f}[/]", *totals)
    disk = Table("disk", "GB", box=None, pad_edge=False)
    for name, size in found.disk.items():
        disk.add_row(name, f"{size / GB:.2f}")
    spent = Table("time", "", box=None, pad_edge=False)
    for name, seconds in found.seconds.items():
        rate = facts[f"{name}_tokens_per_second"]
        told = f"{_duration(seconds)}, {rate:,.0f} tokens/s a device"
        spent.add_row(name, "does not fit" if name in found.too_much else told)
    spent.add_row(
        "assumed",
        f"{device.mfu:.0%} of {device.flops / 1e12:.3g} T operations/s ({device.told}); no waiting "
        "for data, no validation",
    )
    all_tables = [head, memory, disk, spent]
    if measured:
        columns = ("measured", "forecast", "forecast / measured")
        told = Table("this run", *columns, box=None, pad_edge=False)
        for one in measured:
            sizes = (_figure(value, one.unit) for value in (one.measured, one.forecast))
            told.add_row(one.name, *sizes, f"{one.forecast / one.measured:.2f}")
        all_tables.append(told)
    if found.drafting:
        all_tables += _payoffs(found.drafting)
    return all_tables


def _payoffs(drafting: Drafting) -> list[Table]:
    """Rates, speed-ups by batch size and K, and what was measured beside the formula."""
    found = []
    for one in drafting.payoffs:
        rates, some = one.rates, next(iter(one.speedups.values()))
        title = f"drafting pays? {escape(rates.drafter)}, temperature {rates.temperature:g}"
        table = Table(title, box=None, pad_edge=False)
        for drafts in range(1, len(some) + 1):
            mark = "" if drafts <= rates.measured else "?"
            table.add_column(f"K={drafts}{mark}", justify="right")
        table.add_column("best", justify="right")
        places = range(1, len(some) + 1)
        table.add_row("kept there", *(f"{rates.at(place):.1%}" for place in places))
        judged = [f"{count:,}" for count in rates.drafted[: len(some)]]
        table.add_row("of so many", *judged, *[""] * (len(some) - len(judged)))
        table.add_row("tokens a step", *(f"{rates.tokens(place):.2f}" for place in places))
        for batch, told in one.speedups.items():
            best = one.best(batch)
            cells = [
                f"[bold green]{value:.2f}×[/]" if place == best else f"{value:.2f}×"
                for place, value in enumerate(told, 1)
            ]
            table.add_row(f"batch {batch}", *cells, f"K={best}" if best else "plain")
        found.append(table)
    if drafting.checks:
        columns = ("T", "batch", "formula", "measured", "off by")
        table = Table("the formula on the report's own runs", *columns, box=None, pad_edge=False)
        for check in drafting.checks:
            table.add_row(
                f"{escape(check.drafter)}, K={check.drafts}"
                + (" from the other K" if check.left_out else ""),
                f"{check.temperature:g}",
                str(check.batch),
                f"{check.expected:.2f}×",
                f"{check.measured:.2f}×",
                f"{check.off:+.0%}",
            )
        found.append(table)
    return found


def pays(drafting: Drafting) -> list[str]:
    """What the tables of drafting rest on."""
    return [
        f"[dim]drafting: acceptance measured in {escape(str(drafting.report))} on target "
        f"{escape(drafting.target)}; costs: {escape(drafting.told)}. K? is longer than any chain "
        "there: the last rate is taken to go on. See docs/when-drafting-pays.md[/]"
    ]


def _figure(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / GB:.3g} GB"
    return _duration(value) if unit == "seconds" else f"{value:,.0f} tokens/s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
