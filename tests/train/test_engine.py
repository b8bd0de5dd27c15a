"""Optimisers and places of their states: the same training, stopped or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from draftsmith.models.trunk import Trunk
from draftsmith.train.config import TrainConfig
from draftsmith.train.engine import set_rate
from draftsmith.train.loop import Trainer

CONFIG = {
    "max_steps": 4,
    "warmup_steps": 0,
    "log_every": 1,
    "checkpoint_every": 2,
    "precision": "fp32",
    "lr": 0.01,
}
MUON = {"optimizer": "muon", "grad_clip": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    **{f"muon-{stage}": MUON | {"zero_stage": stage} for stage in (0, 1, 2, 3)},
    "offload-1": {"zero_stage": 1, "offload": "optimizer"},
    "offload-2": {"zero_stage": 2, "offload": "optimizer"},
    "offload-3": {"zero_stage": 3, "offload": "optimizer"},
    "offload-all": {"zero_stage": 3, "offload": "all"},
}


def _losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(
    target: Path, toy: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[float]]:
    """Losses of each optimiser at stage 0, nothing offloaded."""
    curves = {}
    for name, settings in (("adamw", {}), ("muon", MUON)):
        out = tmp_path_factory.mktemp(name)
        toy.train(target, out, **CONFIG | settings)
        curves[name] = _losses(out)
    return curves


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_optimiser_follows_the_plain_one_and_resumes(
    target: Path, toy: ModuleType, tmp_path: Path, plain: dict[str, list[float]], kind: str
) -> None:
    """Muon and offloaded states at each stage: the losses of stage 0; stopped half way and resumed
    bit for bit, and at another stage with these losses again. Within 1e-6, or 2e-4 of Muon, whose
    iteration runs in half precision and turns a last bit of the gradient into more."""
    settings = KINDS[kind]
    close = 2e-4 if "optimizer" in settings else 1e-6
    curve = plain[settings.get("optimizer", "adamw")]
    calm, half, other = (tmp_path / name for name in ("calm", "half", "other"))
    toy.train(target, calm, **CONFIG | settings)
    toy.train(target, half, stop=2, **CONFIG | settings)
    shutil.copytree(half, other)
    toy.train(target, half, **CONFIG | settings)
    assert (half / "final.safetensors").read_bytes() == (calm / "final.safetensors").read_bytes()
    assert _losses(half) == _losses(calm) == pytest.approx(curve, rel=close)
    elsewhere = {"zero_stage": (settings["zero_stage"] + 1) % 4, "offload": "none"}
    with pytest.warns(UserWarning) as told:
        toy.train(target, other, **CONFIG | settings | elsewhere)
    assert any("with train.zero_stage=" in str(warning.message) for warning in told)
    assert _losses(other) == pytest.approx(curve, rel=close)


def test_muon_trains_matrices_and_adamw_the_rest(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Matrices but lm_head are Muon's, with a peak of their own; both follow one schedule."""
    head = toy.make_head(target)
    head.lm_head = nn.Parameter(trunk.lm_head.clone())
    cfg = TrainConfig(max_steps=2, warmup_steps=2, precision="fp32", muon_lr=0.04, **MUON)
    trainer = Trainer(head, trunk, toy.NoisePlan(), cfg, tmp_path, progress=False)
    set_rate(trainer.engine, 1e-3, cfg)
    names = {parameter: name for name, parameter in head.named_parameters()}
    rates = {
        names[parameter]: group["lr"]
        for group in trainer.engine.optimizer.param_groups
        for parameter in group["params"]
    }
    assert rates.keys() == {name for name, _ in head.named_parameters()}
    for name, parameter in head.named_parameters():
        muon = parameter.dim() == 2 and name != "lm_head"
        assert rates[name] == (0.5 * 0.04 if muon else 1e-3), name


@pytest.mark.slow
def test_two_ranks_of_muon_follow_one(
    target: Path, toy: ModuleType, tmp_path: Path, run_toy: Callable[..., list[str]]
) -> None:
    """ZeRO 0 to 3 on two ranks = one rank of two micro-batches, also stopped half way: a matrix
    whose rows lie on both ranks has its momentum on both."""
    toy.train(target, tmp_path / "one", **CONFIG | MUON | {"accumulation": 2})
    runs = [
        {
            "out": str(tmp_path / f"two-{stage}"),
            "config": CONFIG | MUON | {"zero_stage": stage},
        }
        | stop
        for stage in (0, 1, 2, 3)
        for stop in ({"stop": 2}, {})
    ]
    run_toy({"target": str(target), "runs": runs}, ranks=2, timeout=300)
    for stage in (0, 1, 2, 3):
        assert _losses(tmp_path / f"two-{stage}") == pytest.approx(
            _losses(tmp_path / "one"), rel=2e-4
        )
