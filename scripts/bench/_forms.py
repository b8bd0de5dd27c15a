"""Two forms of one op side by side: seconds in turns in one process, memory each in its own."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ...models.files import atomic_write_json

Make = Callable[[str, int], Callable[[], Any]]
"""(form, tokens) -> a call of that form."""
LENGTHS = (1024, 2048, 4096)
REPEATS = 3


def seconds(make: Make, forms: tuple[str, ...], length: int) -> dict[str, float]:
    """Median seconds of each form; they take turns, after one call each."""
    calls = {form: make(form, length) for form in forms}
    spent: dict[str, list[float]] = {form: [] for form in forms}
    for turn in range(1 + REPEATS):
        for form, call in calls.items():
            began = time.perf_counter()
            call()
            if turn:
                spent[form].append(time.perf_counter() - began)
    return {form: statistics.median(times) for form, times in spent.items()}


def _tell(place: Connection, make: Make, form: str, length: int) -> None:
    place.send(_growth(make, form, length))


def _growth(make: Make, form: str, length: int) -> float:
    make(form, 64)()
    call = make(form, length)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _peak()
    call()
    return _peak() - before


def _peak() -> float:
    """The largest resident set since it was last forgotten, MiB."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )
    return int(line.split()[1]) / 1024


def peak_mib(make: Make, form: str, length: int) -> float:
    """Growth of the resident set over the first call on a long row, MiB, in a process of its
    own."""
    # Forked from a process without threads, in which no memory lies that was given back.
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(there, make, form, length))
    process.start()
    there.close()  # its end is the child's alone, so a child that fails ends the wait
    try:
        return here.recv()
    finally:
        process.join()


def compare(title: str, make: Make, ours: str, dense: tuple[str, ...], out: list[str]) -> int:
    """Measure, print, and write JSON where a path is given.

    Args:
        ours: the form under test. dense: those that it is held against, the fastest of which the
            ratio is of.
    """
    memory = {length: peak_mib(make, ours, length) for length in LENGTHS}
    other = {form: peak_mib(make, form, LENGTHS[1]) for form in dense}
    taken = seconds(make, (ours, *dense), LENGTHS[1])
    threads = torch.get_num_threads()
    print(f"{title}; {LENGTHS[1]} tokens, {threads} threads, torch {torch.__version__}")
    for form in (ours, *dense):
        place = memory[LENGTHS[1]] if form == ours else other[form]
        print(f"  {form:<24}{1e3 * taken[form]:>9.1f} ms{place:>9.0f} MiB")
    ratio = min(taken[form] for form in dense) / taken[ours]
    grows = ", ".join(f"{length}: {value:.0f}" for length, value in memory.items())
    print(f"  {ratio:.2f} times as fast as the faster of the others; MiB by tokens: {grows}")
    if out:
        report = {
            "title": title,
            "threads": threads,
            "torch": torch.__version__,
            "tokens": LENGTHS[1],
            "seconds": taken,
            "ratio": ratio,
            "peak_mib": {ours: memory} | {form: {LENGTHS[1]: other[form]} for form in dense},
        }
        atomic_write_json(Path(out[0]), report)
    sys.stdout.flush()
    return 0
