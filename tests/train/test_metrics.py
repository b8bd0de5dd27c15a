"""metrics.jsonl survives kills and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.train.metrics import MetricsFile, read_metrics


def _file(tmp_path: Path) -> MetricsFile:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (2, 4, 6):
        metrics.append({"kind": "train", "step": step, "loss": 1.0 / step})
    return metrics


def test_lines_past_the_resumed_step_go(tmp_path: Path) -> None:
    """Resuming at step 4 drops step 6, says how many lines went, and is harmless when repeated."""
    metrics = _file(tmp_path)
    assert metrics.truncate_after(4) == 1
    assert [r["step"] for r in read_metrics(metrics.path)] == [2, 4]
    assert metrics.truncate_after(4) == 0
    metrics.append({"kind": "validation", "step": 6, "loss": 0.5})
    assert [r["kind"] for r in read_metrics(metrics.path)] == ["train", "train", "validation"]


def test_a_torn_last_line_is_left_out_and_removed(tmp_path: Path) -> None:
    """A kill in the middle of a line costs that line alone."""
    metrics = _file(tmp_path)
    with metrics.path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert [r["step"] for r in read_metrics(metrics.path)] == [2, 4, 6]
    metrics.truncate_after(6)
    metrics.append({"kind": "train", "step": 8})
    assert [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()] == [
        2,
        4,
        6,
        8,
    ]


def test_a_damaged_line_inside_is_refused_by_number(tmp_path: Path) -> None:
    """Damage that no kill explains is not skipped."""
    metrics = _file(tmp_path)
    lines = metrics.path.read_text().splitlines()
    metrics.path.write_text("\n".join([lines[0], "{oops", lines[2]]) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is not JSON"):
        list(read_metrics(metrics.path))


def test_no_file_is_nothing_to_truncate(tmp_path: Path) -> None:
    """A fresh run has no metrics yet."""
    assert MetricsFile(tmp_path / "metrics.jsonl").truncate_after(0) == 0


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    """NaN never reaches the file."""
    with pytest.raises(ValueError, match="JSON"):
        MetricsFile(tmp_path / "metrics.jsonl").append(
            {"kind": "train", "step": 1, "loss": float("nan")}
        )
