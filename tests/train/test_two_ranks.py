"""Two gloo ranks train what one rank trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


def _curve(out: Path) -> list[tuple[float, float, float]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["loss"], r["grad_norm"], r["lr"]) for r in records]


@pytest.mark.slow
@pytest.mark.parametrize("eagle3", [False, True], ids=["mtp", "eagle3"])
def test_two_ranks_with_sharded_optimisers_follow_one_rank(
    target: Path, tmp_path: Path, run_toy: Callable[..., list[str]], eagle3: bool
) -> None:
    """ZeRO 0 to 3 on two ranks of one micro-batch = one rank of two: loss and gradient norm within
    1e-4, the same learning rate at every optimiser step (85), also of a head whose lm_head the loss
    reads outside its forward, and no batch read twice or left out
    (87: the curves would part)."""
    config = {
        "max_steps": 12,
        "log_every": 1,
        "precision": "fp32",
        "warmup_steps": 3,
        "checkpoint_every": 0,
    }
    one = {"out": str(tmp_path / "one"), "config": config | {"accumulation": 2}, "eagle3": eagle3}
    run_toy({"target": str(target), "runs": [one]})
    alone = _curve(tmp_path / "one")
    assert len(alone) == 12
    assert alone[-1][0] < alone[0][0]
    stages = {stage: tmp_path / f"zero-{stage}" for stage in (0, 1, 2, 3)}
    runs = [
        {"out": str(out), "config": config | {"zero_stage": stage}, "eagle3": eagle3}
        for stage, out in stages.items()
    ]
    run_toy({"target": str(target), "runs": runs}, ranks=2)
    for out in stages.values():
        for ours, right in zip(_curve(out), alone, strict=True):
            assert ours == pytest.approx(right, rel=1e-4)
