"""What `plan` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from ..train.forecast import GB

if TYPE_CHECKING:
    from .plan import Forecast


def tables(found: Forecast, measured: dict[str, Any] | None) -> list[Table]:
    """A forecast in tables: what it is of, memory, disk, time; and what a run measured, where one
    did."""
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
        told = Table("this run's training", "measured", "forecast", box=None, pad_edge=False)
        peak, rate = measured["peak_memory_bytes"], measured["tokens_per_second"]
        largest = max(
            found.memory[name].total for name in ("train", "validate") if name in found.memory
        )
        told.add_row("most memory of a rank, GB", f"{peak / GB:.2f}", f"{largest / GB:.2f}")
        expected = facts["train_tokens_per_second"] * facts["gpus"]
        told.add_row("tokens/s of all ranks", f"{rate or 0:,.0f}", f"{expected:,.0f}")
        all_tables.append(told)
    return all_tables


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
