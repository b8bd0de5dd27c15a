"""What a run tells while it goes on: metrics lines, also to the tracker, the progress bar, and that
it waits for its data."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .metrics import MetricsFile
from .ranks import rank
from .tracker import Tracker

_WAIT_SHARE = 0.1  # of the time of a metrics line: more is told
_WAIT_SECONDS = 1.0  # waited for less, a line's time is too short to judge by


class RunLog:
    """Where the figures of a run go. Every rank may call it; rank 0 writes.

    Args:
        path: metrics.jsonl. tracker: gets every line as well. prefetch: the run's, named in the
            warning. progress: whether a bar is drawn.
    """

    def __init__(self, path: Path, tracker: Tracker | None, *, prefetch: int, progress: bool):
        self.metrics = MetricsFile(path)
        self.tracker = tracker
        self.prefetch = prefetch
        self.progress = progress
        self._bar: tqdm | None = None
        self._told_of_waiting = False

    def bar(self, done: int, total: int) -> tqdm:
        """The progress bar, a context; it shows the figures of every training line from now on."""
        hidden = not self.progress or rank() != 0
        self._bar = tqdm(total=total, initial=done, unit="step", disable=hidden, dynamic_ncols=True)
        return self._bar

    def continue_after(self, step: int, *, validated: bool) -> None:
        """Drop the lines that a resumed run writes again: those after `step`, and its validation
        where it is not `validated` yet."""
        if rank() == 0:
            self.metrics.truncate_after(step, validated=validated)

    def trained(self, step: int, rate: float, figures: dict[str, Any]) -> None:
        """A line of the training up to `step`, whose learning rate was `rate`."""
        if self._bar is not None:
            self._bar.set_postfix(
                loss=f"{figures['loss']:.3f}",
                tok_s=f"{figures['tokens_per_second']:.0f}",
                wait=f"{figures['wait_share']:.1%}",
                refresh=False,
            )
        if rank() == 0:
            line = {"lr": rate, **figures}
            self.metrics.append({"kind": "train", "step": step, **line})
            if self.tracker is not None:
                self.tracker.log(step, {"train": line})
            self._tell_of_waiting(step, figures)

    def validated(self, step: int, figures: dict[str, Any]) -> None:
        """A line of the validation after `step`."""
        if rank() == 0:
            self.metrics.append({"kind": "validation", "step": step, **figures})
            if self.tracker is not None:
                self.tracker.log_validation(step, figures)

    def _tell_of_waiting(self, step: int, figures: dict[str, Any]) -> None:
        """Warn once where data comes too slowly; a moment's waiting says nothing."""
        share = figures["wait_share"]
        seconds = sum(figures["seconds"].values())
        if self._told_of_waiting or share <= _WAIT_SHARE or share * seconds < _WAIT_SECONDS:
            return
        self._told_of_waiting = True
        warnings.warn(
            f"{share:.0%} of the time before step {step} was waiting for data: raise "
            f"train.prefetch={self.prefetch} where reading is uneven; where it is too slow "
            "throughout, put the cache on a local disk, or with data.source=online give the "
            "target more ranks (data.online.target_ranks) or dump a cache",
            stacklevel=4,
        )
