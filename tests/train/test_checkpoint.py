"""Checkpoints are whole or not there."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.models.trunk import Trunk
from draftsmith.train.checkpoint import Checkpoints, damage
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import Trainer
from draftsmith.train.metrics import read_metrics


def _trainer(trunk: Trunk, target: Path, toy: ModuleType, out: Path, **config: Any) -> Trainer:
    defaults = {
        "max_steps": 4,
        "log_every": 1,
        "precision": "fp32",
        "checkpoint_every": 1,
        "keep_checkpoints": 3,
    }
    cfg = TrainConfig(**(defaults | config))
    return Trainer(toy.make_head(target), trunk, toy.NoisePlan(), cfg, out, progress=False)


def _save(
    trainer: Trainer, step: int, score: float | None = None, basis: str | None = None
) -> None:
    saved = trainer.checkpoints.save(trainer.engine, step, data={"cursor": step}, config={})
    if score is not None:
        trainer.checkpoints.judge(saved, score, 0, basis)


def _losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl")]


def _files(trainer: Trainer, pattern: str) -> list[Path]:
    return sorted((trainer.checkpoints.folder / "step-00000005").glob(pattern))


def test_half_a_checkpoint_is_reported_removed_and_not_loaded(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Without its marker the newest folder does not exist; the one before is found, with no
    "latest" file anywhere (80)."""
    _trainer(trunk, target, toy, tmp_path).run()
    folders = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [f.name for f in folders] == ["step-00000002", "step-00000003", "step-00000004"]
    assert not (tmp_path / "checkpoints" / "latest").exists()
    (folders[-1] / "complete.json").unlink()
    trainer = _trainer(trunk, target, toy, tmp_path)
    with pytest.warns(UserWarning, match="step-00000004 is half a checkpoint"):
        found = trainer.resume()
    assert found is not None and found.step == trainer.step == 3
    assert not folders[-1].exists()


@pytest.mark.parametrize("fault", ["cut", "flipped", "missing"])
def test_a_damaged_checkpoint_is_named_and_passed_over(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path, fault: str
) -> None:
    """A file that is shorter, other or gone: the message says which, and the checkpoint before is
    used."""
    _trainer(trunk, target, toy, tmp_path).run()
    newest = tmp_path / "checkpoints" / "step-00000004"
    states = newest / "weights.safetensors"
    data = states.read_bytes()
    assert damage(newest) is None
    if fault == "cut":
        states.write_bytes(data[:-7])
    elif fault == "flipped":
        states.write_bytes(data[:900] + bytes([data[900] ^ 1]) + data[901:])
    else:
        states.unlink()
    trainer = _trainer(trunk, target, toy, tmp_path)
    with pytest.warns(
        UserWarning, match=r"step-00000004 is damaged and ignored: .*weights\.safetensors"
    ):
        found = trainer.resume()
    assert found is not None and found.step == 3


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_save_load_save_needs_no_step_between(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path, zero_stage: int
) -> None:
    """The round trip leaves weights and random states bit for bit as they were saved (80, 84)."""
    trainer = _trainer(trunk, target, toy, tmp_path, max_steps=1, zero_stage=zero_stage)
    trainer.run()
    checkpoints = trainer.checkpoints
    weights = {k: v.clone() for k, v in trainer.whole_head().state_dict().items()}
    _save(trainer, 5)
    states = {path.name: path.read_bytes() for path in _files(trainer, "*.safetensors")}
    drawn = torch.rand(3), np.random.rand(3), random.random()
    for _ in range(2):
        with torch.no_grad():
            for parameter in trainer.head.parameters():
                parameter.add_(1.0)
        found = checkpoints.latest()
        assert found is not None and found.step == 5
        checkpoints.load(trainer.engine, found)
        again = torch.rand(3), np.random.rand(3), random.random()
        assert (
            torch.equal(again[0], drawn[0])
            and (again[1] == drawn[1]).all()
            and again[2] == drawn[2]
        )
        checkpoints.load(trainer.engine, found)
        whole = trainer.whole_head().state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in whole.items())
        checkpoints.load(trainer.engine, found)
        _save(trainer, 5)
        assert states == {path.name: path.read_bytes() for path in _files(trainer, "*.safetensors")}


def test_newest_and_best_are_kept(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """keep=2 leaves the two newest and the best; of equal scores the newer is the best."""
    trainer = _trainer(trunk, target, toy, tmp_path, keep_checkpoints=2)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.9), (4, None), (5, 0.1), (6, None)):
        _save(trainer, step, score)
    assert [c.step for c in trainer.checkpoints.whole()] == [3, 5, 6]
    best = trainer.checkpoints.best()
    assert best is not None and best.step == 3


def test_another_format_is_refused(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """The refusal names both versions."""
    _trainer(trunk, target, toy, tmp_path, max_steps=1).run()
    marker = tmp_path / "checkpoints" / "step-00000001" / "complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 7}))
    with pytest.raises(ValueError, match="format 7"):
        Checkpoints(tmp_path / "checkpoints", 1).whole()


def test_the_best_is_looked_for_among_scores_of_one_basis(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """A high score measured otherwise neither wins nor is kept for it; a step without a score
    changes nothing."""
    trainer = _trainer(trunk, target, toy, tmp_path, keep_checkpoints=1)
    for step, score, basis in ((1, 9.0, "a"), (2, 2.0, "b"), (3, 1.0, "b"), (4, None, None)):
        _save(trainer, step, score, basis)
    best = trainer.checkpoints.best()
    assert best is not None and (best.step, best.score, best.basis) == (2, 2.0, "b")
    assert [found.step for found in trainer.checkpoints.whole()] == [2, 4]


def test_a_changed_measure_begins_a_new_best(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Step 2's lower score is the best of its basis; it is told once."""
    kept: list[int] = []

    def trainer(steps: int, scores: list[float], basis: str) -> Trainer:
        made = _trainer(trunk, target, toy, tmp_path, max_steps=steps, validate_every=1)
        measured = iter(scores)
        made.validate = lambda head: {"score": next(measured), "basis": basis}
        made.on_best = lambda head, step, figures: kept.append(step)
        return made

    trainer(1, [9.0], "a").run()
    with pytest.warns(UserWarning) as told:
        result = trainer(3, [2.0, 1.0], "b").run()
    assert sum("measured with other settings" in str(one.message) for one in told) == 1
    assert kept == [1, 2] and result.best is not None and result.best.step == 2


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_every_stage_goes_on_from_every_stage(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path, written: int
) -> None:
    """Two steps at one stage and two at another follow four undisturbed ones; at the same stage bit
    for bit."""
    _trainer(trunk, target, toy, tmp_path / "whole", max_steps=4, lr=0.01).run()
    curve = _losses(tmp_path / "whole")
    half = tmp_path / "half"
    _trainer(trunk, target, toy, half, max_steps=2, lr=0.01, zero_stage=written).run()
    for stage in (0, 1, 2, 3):
        out = tmp_path / f"to-{stage}"
        shutil.copytree(half, out)
        trainer = _trainer(trunk, target, toy, out, max_steps=4, lr=0.01, zero_stage=stage)
        with pytest.warns(UserWarning, match="resuming step-00000002 with train"):
            trainer.run()
        assert _losses(out) == pytest.approx(curve, rel=1e-6), stage
