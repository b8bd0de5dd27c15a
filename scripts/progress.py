"""A progress bar for terminals; a few lines where the output is a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Report = Callable[[int, int | None], None]


@contextmanager
def progress(console: Console, what: str, unit: str) -> Iterator[Report]:
    """Yields `report(done, total)`, total None while unknown. Shows count, rate per second, elapsed
    and remaining time."""
    if not console.is_terminal or console.quiet:
        yield _plain(console, what, unit)
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")
        start = time.perf_counter()

        def report(done: int, total: int | None) -> None:
            rate = done / max(time.perf_counter() - start, 1e-9)
            bar.update(task, completed=done, total=total, rate=f"{rate:,.0f} {unit}/s")

        yield report


def _plain(console: Console, what: str, unit: str) -> Report:
    """A line every ten seconds."""
    start = last = time.perf_counter()

    def report(done: int, total: int | None) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= 10:
            last = now
            whole = f" of {total:,}" if total else ""
            console.print(
                f"  {what}: {done:,}{whole} {unit}, {done / (now - start):,.0f}/s", highlight=False
            )

    return report
