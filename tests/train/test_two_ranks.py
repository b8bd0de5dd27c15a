"""Two gloo ranks train what one rank trains, and are refused what one is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STAGES = (0, 1, 2, 3)
CONFIG = {
    "max_steps": 12,
    "log_every": 1,
    "precision": "fp32",
    "warmup_steps": 3,
    "checkpoint_every": 0,
}
HEADS = {"mtp": False, "eagle3": True}
GROUP = {"sequence_parallel": 2}


def _curve(out: Path) -> list[tuple[float, float, float]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["loss"], r["grad_norm"], r["lr"]) for r in records]


@pytest.mark.slow
def test_two_ranks_with_sharded_optimisers_follow_one_rank(
    target: Path, toy: ModuleType, tmp_path: Path, run_toy: Callable[..., list[str]]
) -> None:
    """ZeRO 0 to 3 on two ranks of one micro-batch = one rank of two: loss and gradient norm within
    1e-4, the same learning rate at every optimiser step (85), also of a head whose lm_head the loss
    reads outside its forward, and no batch read twice or left out (87: the curves would part). So
    does a run that shares each batch half way and then no more, or begins to share."""
    runs: list[dict[str, Any]] = []
    for name, eagle3 in HEADS.items():
        out, further = tmp_path / f"{name}-one", {"accumulation": 2}
        toy.train(target, out, eagle3=eagle3, **CONFIG | further)
        for stage in STAGES:
            out, config = tmp_path / f"{name}-{stage}", CONFIG | {"zero_stage": stage}
            runs.append({"out": str(out), "config": config, "eagle3": eagle3})
    shared, alone = CONFIG | GROUP | {"accumulation": 2}, CONFIG
    for name, stage, (first, then) in (
        ("mtp-part", 0, (shared, alone)),
        ("mtp-join", 3, (alone, shared)),
    ):
        half = {"checkpoint_every": 6, "zero_stage": stage}
        out = str(tmp_path / name)
        runs.append({"out": out, "config": first | half, "stop": 6})
        runs.append({"out": out, "config": then | half})
    run_toy({"target": str(target), "runs": runs}, ranks=2, timeout=400)
    for name in HEADS:
        one = _curve(tmp_path / f"{name}-one")
        assert len(one) == 12 and one[-1][0] < one[0][0]
        followers = [*STAGES, "part", "join"] if name == "mtp" else STAGES
        for follower in followers:
            for ours, right in zip(_curve(tmp_path / f"{name}-{follower}"), one, strict=True):
                assert ours == pytest.approx(right, rel=1e-4), (name, follower)


@pytest.mark.slow
def test_what_is_not_finite_ends_all_ranks_with_the_rows_of_all(
    target: Path, tmp_path: Path, run_toy: Callable[..., list[str]]
) -> None:
    """A NaN loss or gradient in rows of one rank or of both, at ZeRO 0 to 3, alone or with every
    batch shared (where looking for the rows communicates): each rank says the same, and ends."""
    batches = [[[n, 9 + 4 * n, True]] for n in range(8)]
    both, one = ["row-4", "row-7"], ["row-7"]
    cases: list[tuple[str, list[str], dict[str, Any], str]] = [
        ("loss", both, {"zero_stage": 0}, "rows row-4 of rank 0; rows row-7 of rank 1"),
        ("gradient", both, {"zero_stage": 0}, "rows row-4 of rank 0; rows row-7 of rank 1"),
        ("gradient", both, {"zero_stage": 2}, "rows row-4 of rank 0; rows row-7 of rank 1"),
        ("gradient", one, {"zero_stage": 1}, "rows row-7 of rank 1"),
        ("gradient", one, {"zero_stage": 2, "chunk_tokens": 5}, "rows row-7 of rank 1"),
        ("loss", one, GROUP | {"zero_stage": 1}, "rows row-7 of rank 0; rows row-7 of rank 1"),
        ("gradient", one, GROUP | {"zero_stage": 0}, "rows row-7 of rank 0; rows row-7 of rank 1"),
        ("gradient", one, {"zero_stage": 3}, "rows row-7 of rank 1"),
        ("gradient", one, GROUP | {"zero_stage": 3}, "rows row-7 of rank 0; rows row-7 of rank 1"),
    ]
    runs = []
    for number, (what, rows, further, _) in enumerate(cases):
        shared = "sequence_parallel" in further
        config = {"max_steps": 2, "precision": "fp32", "accumulation": 4 if shared else 2}
        runs.append(
            {
                "out": str(tmp_path / str(number)),
                "batches": batches,
                "config": config | further,
                "faults": {what: rows},
            }
        )
    outputs = run_toy({"target": str(target), "runs": runs}, ranks=2, timeout=200)
    for output in outputs:
        told = [json.loads(line) for line in output.splitlines() if line.startswith('"')]
        assert len(told) == len(cases)
        for said, (what, _, further, named) in zip(told, cases, strict=True):
            begins = f"the {what} of optimiser step 1 is not finite: {named}; check those rows"
            assert said.startswith(begins), (further, said)
