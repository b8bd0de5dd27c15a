"""The gradient of an optimiser step does not depend on how its rows are spread.

With betas (0, …) and no clipping AdamW's first moment after one step *is* the averaged gradient,
so it is read from the checkpoint, at every stage and from every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

Row = tuple[int, int, bool]
A, B, C, D = (1, 9, True), (2, 60, True), (3, 33, True), (4, 17, True)
STAGES = (0, 1, 2, 3)
CONFIG = {"max_steps": 1, "precision": "fp32", "betas": [0.0, 0.95], "grad_clip": 0.0}


class Spread(NamedTuple):
    """Rows in the micro-batches of all ranks in turn, and what else is told."""

    batches: list[list[Row]]
    stages: tuple[int, ...] = STAGES
    further: dict[str, Any] = {}  # noqa: RUF012 (read alone)
    eagle3: bool = False

    def runs(self, out: Path, ranks: int) -> list[dict[str, Any]]:
        """A run for each stage; all batches are one step."""
        batches = ranks // self.further.get("sequence_parallel", 1)
        config = CONFIG | {"accumulation": len(self.batches) // batches} | self.further
        return [
            {
                "out": f"{out}-{stage}",
                "batches": self.batches,
                "eagle3": self.eagle3,
                "config": config | {"zero_stage": stage},
            }
            for stage in self.stages
        ]


UNEVEN = [[A], [B, C, D]]
AGAIN, CHUNKED = {"checkpoint_activations": True}, {"chunk_tokens": 7}
SHARED, HALF = {"sequence_parallel": 2}, {"precision": "bf16"}
MASKED, LONG = (5, 60, False), (7, 60, False)
ONE = {
    "packed": Spread([[A, B, C, D]]),
    "two": Spread([[A, B], [C, D]], (0, 1)),
    "unpacked": Spread([[A], [B], [C], [D]], (0, 2)),
    "computed again": Spread([[A, B, C, D]], (0, 3), AGAIN),
    "chunked": Spread([[A, B, C, D]], (0, 1), CHUNKED),
    "half": Spread([[A, B, C, D]], (0,), HALF),
    "lone": Spread([[B]], (0,)),
    "eagle3": Spread([[A, B, C, D]], (0, 3), eagle3=True),
}
TWO = {
    "uneven": Spread(UNEVEN),
    "accumulated": Spread([[A], [B], [C], [D]]),
    "masked": Spread([[A, B, C, D], [(5, 21, False)]]),
    "one token": Spread([[A, B, C, D], [(6, 1, True)]]),
    "computed again on two": Spread(UNEVEN, (2, 3), AGAIN),
    "chunked on two": Spread(UNEVEN, (1, 2), CHUNKED),
    "shared": Spread([[A, B, C, D]], STAGES, SHARED),
    "two shared": Spread([[A, B], [C, D]], (0, 3), SHARED),
    "half shared": Spread([[A, B, C, D]], (1, 3), SHARED | HALF),
    "eagle3 masked": Spread([[A, B, C, D], [(5, 21, False)]], STAGES, eagle3=True),
    "eagle3 shared": Spread([[A, B, C, D]], (0, 3), SHARED, eagle3=True),
    # Rank 0 has the first and the last quarter of the rows: nothing that is supervised.
    "lone shared": Spread([[MASKED, B, LONG]], (0, 2), SHARED),
}


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


def _errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Parameter -> how far its gradient is off, as a share of its norm."""
    assert found.keys() == right.keys()
    return {
        name: float((found[name].double() - value.double()).norm() / value.norm())
        for name, value in right.items()
    }


@pytest.mark.slow
def test_any_spread_of_the_rows_gives_the_same_gradient(
    tiny_llama_folder: Callable[..., Path],
    toy: ModuleType,
    tmp_path: Path,
    run_toy: Callable[..., list[str]],
) -> None:
    """Packed, unpacked, accumulated; computed again in backward, in chunks of rows; on two ranks,
    also unevenly, with nothing supervised on one and with a lone token, which trains nothing, on
    one, also of a head with an lm_head; with every batch shared by both, also where one learns
    nothing of it; each at ZeRO 0 to 3: every parameter's gradient within 1e-6 of its norm (85, 86).
    In bf16, shared ones are as near to those of fp32 as those of one rank are.

    Weights have the usual spread: chunks and shares round otherwise than one piece, and with ten
    times that spread fp32 itself is 5e-6 from fp64."""
    target = tiny_llama_folder(num_hidden_layers=2, initializer_range=0.02)
    for name, spread in ONE.items():
        for run in spread.runs(tmp_path / name, 1):
            out, config = Path(run.pop("out")), run.pop("config")
            toy.train(target, out, **run, **config)
    runs = [run for name, spread in TWO.items() for run in spread.runs(tmp_path / name, 2)]
    run_toy({"target": str(target), "runs": runs}, ranks=2, timeout=400)
    names = ("packed", "lone", "eagle3")
    references = {name: _gradients(tmp_path / f"{name}-0") for name in names}
    for reference in references.values():
        assert all(bool(value.any()) for value in reference.values()) and len(reference) >= 13
    rounded = _errors(_gradients(tmp_path / "half-0"), references["packed"])
    for name, spread in (ONE | TWO).items():
        for stage in spread.stages:
            right = references.get(name.split()[0], references["packed"])
            errors = _errors(_gradients(tmp_path / f"{name}-{stage}"), right)
            for parameter, error in errors.items():
                allowed = 1e-6
                if spread.further.get("precision") == "bf16":
                    allowed = 1.3 * rounded[parameter] + 1e-3
                assert error < allowed, (name, stage, parameter, error)
