"""A resumed run is the undisturbed run, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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
@pytest.mark.parametrize(("zero_stage", "precision", "ranks"), [(0, "bf16", 1), (2, "fp32", 2)])
def test_killed_and_resumed_equals_undisturbed(
    target: Path,
    tmp_path: Path,
    run_toy: Callable[..., list[str]],
    zero_stage: int,
    precision: str,
    ranks: int,
) -> None:
    """SIGKILL at random moments and in the middle of a checkpoint, on one process and to the ranks
    of two: same weights, same losses, rates and norms line by line, each step logged once (77, 78,
    79, 84). DRAFTSMITH_KILLS sets how often (2)."""
    kills = int(os.environ.get("DRAFTSMITH_KILLS", "2"))
    out, calm = tmp_path / "killed", tmp_path / "calm"
    config = {
        "max_steps": 20 + 12 * kills,
        "warmup_steps": 7,
        "unroll_warmup": 10,
        "accumulation": 2,
        "log_every": 1,
        "validate_every": 0,
        "checkpoint_every": 3,
        "zero_stage": zero_stage,
        "precision": precision,
    }
    spec = {"target": str(target), "out": str(out), "undisturbed": str(calm), "config": config}
    spec |= {"kills": [("delay", "half")[n % 2] for n in range(kills)], "ranks": ranks}
    (output,) = run_toy(spec, timeout=120 + 60 * kills)
    assert json.loads(output.splitlines()[-1])["died"] == kills
    _require_equal(out, calm)
    steps = [line["step"] for line in _lines(out / "metrics.jsonl")]
    assert steps == list(range(1, config["max_steps"] + 1))


STAGES = (0, 3)
CONFIG = {
    "max_steps": 40,
    "warmup_steps": 7,
    "unroll_warmup": 25,
    "log_every": 1,
    "checkpoint_every": 20,
    "precision": "fp32",
}


@pytest.mark.slow
def test_twenty_and_twenty_steps_are_forty(
    target: Path, toy: ModuleType, tmp_path: Path, run_toy: Callable[..., list[str]]
) -> None:
    """Stopped half way, with the rate falling and the unroll still to grow. The same ranks and
    stage: the undisturbed run bit for bit. From one process to two ranks and back, at ZeRO 0
    and 3: its losses within 1e-6."""

    def alone(name: str, stage: int, stop: int | None = None) -> None:
        config = CONFIG | {"zero_stage": stage, "accumulation": 2}
        toy.train(target, tmp_path / name, stop=stop, **config)

    def run(name: str, stage: int, **further: Any) -> dict[str, Any]:
        return {
            "out": str(tmp_path / name),
            "config": CONFIG | {"zero_stage": stage},
        } | further

    both = []
    for stage in STAGES:
        alone(f"calm-1-{stage}", stage)
        alone(f"half-1-{stage}", stage, 20)
        shutil.copytree(tmp_path / f"half-1-{stage}", tmp_path / f"one-two-{stage}")
        alone(f"half-1-{stage}", stage)
        both += [
            run(f"calm-2-{stage}", stage),
            run(f"half-2-{stage}", stage, stop=20),
            run(f"half-2-{stage}", stage),
            run(f"one-two-{stage}", stage),
            run(f"two-one-{stage}", stage, stop=20),
        ]
    run_toy({"target": str(target), "runs": both}, ranks=2, timeout=400)
    for stage in STAGES:
        with pytest.warns(UserWarning, match=r"with train\.accumulation=2"):
            alone(f"two-one-{stage}", stage)
        for ranks in (1, 2):
            _require_equal(tmp_path / f"half-{ranks}-{stage}", tmp_path / f"calm-{ranks}-{stage}")
        for name, calm in (("one-two", "calm-1"), ("two-one", "calm-2")):
            losses, right = (
                [line["loss"] for line in _lines(tmp_path / f"{run}-{stage}" / "metrics.jsonl")]
                for run in (name, calm)
            )
            assert losses[:20] == right[:20]
            assert losses == pytest.approx(right, rel=1e-6), (name, stage)


def _require_equal(one: Path, two: Path) -> None:
    assert (one / "final.safetensors").read_bytes() == (two / "final.safetensors").read_bytes()
    assert _lines(one / "metrics.jsonl") == _lines(two / "metrics.jsonl")
