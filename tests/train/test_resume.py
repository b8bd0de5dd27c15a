"""A resumed run is the undisturbed run, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _lines(path: Path) -> list[dict[str, Any]]:
    """Metrics without what a clock decides."""
    clock = ("tokens_per_second", "seconds", "wait_share")
    return [
        {k: v for k, v in json.loads(line).items() if k not in clock}
        for line in path.read_text().splitlines()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "bf16"), (1, "fp32")])
def test_killed_five_times_and_resumed_equals_undisturbed(
    target: Path, tmp_path: Path, run_toy: Callable[..., list[str]], zero_stage: int, precision: str
) -> None:
    """SIGKILL at random moments and in the middle of a checkpoint: same weights, same losses, rates
    and norms line by line, each step logged once (77, 78, 79, 84)."""
    out, calm = tmp_path / "killed", tmp_path / "calm"
    config = {
        "max_steps": 50,
        "warmup_steps": 7,
        "accumulation": 2,
        "log_every": 1,
        "validate_every": 0,
        "checkpoint_every": 3,
        "zero_stage": zero_stage,
        "precision": precision,
    }
    spec = {"target": str(target), "out": str(out), "undisturbed": str(calm), "config": config}
    (output,) = run_toy(spec | {"kills": ["delay", "half", "delay", "half", "delay"]})
    assert json.loads(output.splitlines()[-1])["died"] == 5
    assert (out / "final.safetensors").read_bytes() == (calm / "final.safetensors").read_bytes()
    assert _lines(out / "metrics.jsonl") == _lines(calm / "metrics.jsonl")
    assert [line["step"] for line in _lines(out / "metrics.jsonl")] == list(range(1, 51))
