"""The gradient of an optimiser step does not depend on how its rows are spread.

With betas (0, …) and no clipping AdamW's first moment after one step *is* the averaged gradient,
so it is read from the checkpoint, at every stage and from every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

Rows = list[tuple[int, int, bool]]
A, B, C, D = (1, 9, True), (2, 60, True), (3, 33, True), (4, 17, True)
MASKED = (5, 21, False)
STAGES = (0, 1, 2, 3)
ALONE: dict[str, list[Rows]] = {
    "packed": [[A, B, C, D]],
    "two": [[A, B], [C, D]],
    "unpacked": [[A], [B], [C], [D]],
}
"""Name -> the micro-batches of one process."""
BOTH: dict[str, list[Rows]] = {
    "uneven": [[A], [B, C, D]],
    "accumulated": [[A], [B], [C], [D]],
    "masked": [[A, B, C, D], [MASKED]],
    "one token": [[A, B, C, D], [(6, 1, True)]],
}
"""Those of two ranks in turn."""
CONFIG = {"max_steps": 1, "precision": "fp32", "betas": [0.0, 0.95], "grad_clip": 0.0}


def _gradients(out: Path) -> dict[str, Tensor]:
    """Name -> gradient, flattened, joined from all ranks' pieces."""
    (folder,) = (out / "checkpoints").glob("step-*")
    pieces: dict[str, dict[int, Tensor]] = {}
    for path in folder.glob("optimizer-*.safetensors"):
        for entry, value in load_file(path).items():
            key, name, start = entry.split("/")
            if key == "exp_avg":
                pieces.setdefault(name, {})[int(start)] = value
    return {name: torch.cat([p[start] for start in sorted(p)]) for name, p in pieces.items()}


@pytest.mark.slow
def test_any_spread_of_the_rows_gives_the_same_gradient(
    target: Path, toy: ModuleType, tmp_path: Path, run_toy: Callable[..., list[str]]
) -> None:
    """Packed, unpacked, accumulated; on two ranks, also unevenly, with nothing supervised on one
    and with a lone token, which trains nothing, on one; each at ZeRO 0 to 3: every parameter's
    gradient within 1e-6 of its norm (85, 86)."""
    for name, batches in ALONE.items():
        for stage in STAGES:
            further = {"zero_stage": stage, "accumulation": len(batches)}
            toy.train(target, tmp_path / f"{name}-{stage}", batches=batches, **CONFIG, **further)
    runs = [
        {
            "out": str(tmp_path / f"{name}-{stage}"),
            "batches": batches,
            "config": CONFIG | {"zero_stage": stage, "accumulation": len(batches) // 2},
        }
        for name, batches in BOTH.items()
        for stage in STAGES
    ]
    run_toy({"target": str(target), "runs": runs}, ranks=2, timeout=400)
    reference = _gradients(tmp_path / "packed-0")
    assert all(bool(value.any()) for value in reference.values()) and len(reference) == 13
    for name in (*ALONE, *BOTH):
        for stage in STAGES:
            found = _gradients(tmp_path / f"{name}-{stage}")
            assert found.keys() == reference.keys()
            for parameter, value in reference.items():
                error = (found[parameter].double() - value.double()).norm() / value.norm()
                assert error < 1e-6, (name, stage, parameter, float(error))
