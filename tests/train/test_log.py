"""What a run writes and says, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from draftsmith.train.log import RunLog
from draftsmith.train.metrics import best_validation, read_metrics
from draftsmith.train.tracker import Tracker


class _Told:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, dict[str, Any]]] = []

    def log(self, step: int, figures: dict[str, Any]) -> None:
        self.lines.append(("train", step, figures))

    def log_validation(self, step: int, figures: dict[str, Any]) -> None:
        self.lines.append(("validation", step, figures))


def _figures(share: float, seconds: float) -> dict[str, Any]:
    return {
        "loss": 1.5,
        "tokens_per_second": 10.0,
        "wait_share": share,
        "seconds": {"wait": share * seconds, "step": (1 - share) * seconds},
    }


def test_lines_go_to_the_file_and_the_tracker(tmp_path: Path) -> None:
    """In their order, with their kind; a resumed run drops those it writes again."""
    told = _Told()
    log = RunLog(tmp_path / "m.jsonl", cast(Tracker, told), prefetch=2, progress=False)
    with log.bar(0, 9):
        log.trained(1, 0.5, _figures(0.0, 1.0))
        log.validated(1, {"score": 2.0})
        log.trained(2, 0.25, _figures(0.0, 1.0))
    lines = list(read_metrics(tmp_path / "m.jsonl"))
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("train", 1),
        ("validation", 1),
        ("train", 2),
    ]
    assert (lines[0]["lr"], lines[2]["lr"], lines[1]["score"]) == (0.5, 0.25, 2.0)
    first = {"train": {"lr": 0.5, **_figures(0.0, 1.0)}}
    assert told.lines[:2] == [("train", 1, first), ("validation", 1, {"score": 2.0})]
    log.continue_after(1, validated=False)
    assert [line["kind"] for line in read_metrics(tmp_path / "m.jsonl")] == ["train"]


def test_waiting_is_told_once_and_only_where_it_costs(tmp_path: Path) -> None:
    """A large share of a moment and a small share of an hour are no reason to speak."""
    log = RunLog(tmp_path / "m.jsonl", None, prefetch=3, progress=False)
    log.trained(1, 0.1, _figures(0.9, 0.5))
    log.trained(2, 0.1, _figures(0.05, 3600.0))
    with pytest.warns(UserWarning, match=r"50% of the time before step 3 .* train\.prefetch=3"):
        log.trained(3, 0.1, _figures(0.5, 10.0))
    log.trained(4, 0.1, _figures(0.5, 10.0))  # a second warning would be an error


def test_the_best_validation_is_of_the_last_measure() -> None:
    """Scores of another basis do not compare; of equals the later counts."""

    def line(step: int, score: float, basis: str) -> dict[str, Any]:
        return {"kind": "validation", "step": step, "score": score, "basis": basis}

    lines = [line(1, 9.0, "a"), line(2, 1.0, "b"), line(3, 2.0, "b"), line(4, 2.0, "b")]
    best = best_validation([*lines, {"kind": "train", "step": 5}])
    assert best is not None and best["step"] == 4
    assert best_validation([]) is None
