"""The trainer in this process: normalisation, resume, refusals, and what it leaves alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftsmith.data.batches import PackedBatch
from draftsmith.kernels.losses import LossConfig
from draftsmith.models.heads import Head
from draftsmith.models.trunk import Trunk
from draftsmith.train.checkpoint import damage
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import Trainer, TrainResult
from draftsmith.train.metrics import read_metrics
from draftsmith.train.objective import Objective
from draftsmith.train.schedule import lr_at
from draftsmith.train.unroll import unroll
from draftsmith.train.validation import Validator


class _Listed:
    """A plan that repeats the given batches."""

    def __init__(self, batches: list[PackedBatch]) -> None:
        self.batches = batches

    def batch(self, index: int) -> PackedBatch:
        return self.batches[index % len(self.batches)]

    def state_dict(self, cursor: int) -> dict[str, Any]:
        return {"cursor": cursor}

    def load_state_dict(self, state: dict[str, Any]) -> int:
        return int(state["cursor"])


def _trainer(trunk: Trunk, head: Head, plan: Any, out: Path, **config: Any) -> Trainer:
    validate = config.pop("validate", None)
    on_best = config.pop("on_best", None)
    defaults = {
        "max_steps": 2,
        "warmup_steps": 0,
        "log_every": 1,
        "precision": "fp32",
        "checkpoint_every": 0,
    }
    cfg = TrainConfig(**(defaults | config))
    return Trainer(head, trunk, plan, cfg, out, progress=False, validate=validate, on_best=on_best)


def _weights(head: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in head.state_dict().items()}


def test_two_micro_batches_weigh_what_one_batch_weighs(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """One batch of two rows = two accumulated batches of one row each, though one of them holds
    most supervised tokens: same loss, gradient norm and weights (86)."""
    rows = [toy.random_row(1, 9), toy.random_row(2, 60)]
    heads, records = [], []
    for name, batches in (
        ("one", [toy.packed(rows)]),
        ("two", [toy.packed(rows[:1]), toy.packed(rows[1:])]),
    ):
        head = toy.make_head(target)
        _trainer(trunk, head, _Listed(batches), tmp_path / name, accumulation=len(batches)).run()
        heads.append(_weights(head))
        records.append(list(read_metrics(tmp_path / name / "metrics.jsonl")))
    for one, two in zip(*records, strict=True):
        assert (two["loss"], two["grad_norm"]) == pytest.approx(
            (one["loss"], one["grad_norm"]), rel=1e-5
        )
        assert two["supervised"] == one["supervised"] and two["tokens"] == one["tokens"] == 69
    for name, value in heads[0].items():
        torch.testing.assert_close(heads[1][name], value, rtol=0, atol=1e-4, msg=name)


def test_the_first_gradient_norm_is_that_of_the_plain_loss(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """DeepSpeed's engine adds nothing: loss and norm of step 1 are those of the objective over its
    weight."""
    batch = toy.packed([toy.random_row(1, 40)])
    head = toy.make_head(target)
    trainer = _trainer(trunk, head, _Listed([batch]), tmp_path, max_steps=1)
    loss, stats = trainer.objective(head, batch, 3)
    mean = loss / stats.weight.sum()
    norm = torch.nn.utils.get_total_norm(torch.autograd.grad(mean, list(head.parameters())))
    trainer.run()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["loss"] == pytest.approx(float(mean.detach()), rel=1e-6)
    assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_an_all_masked_batch_is_a_step_that_moves_nothing(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Nothing supervised: loss and gradient norm are 0, weights stay, the run goes on (34)."""
    batch = toy.packed([toy.random_row(1, 20)])
    batch.supervised.zero_()
    head = toy.make_head(target)
    before = _weights(head)
    result = _trainer(trunk, head, _Listed([batch]), tmp_path).run()
    assert result.step == 2
    assert all(
        r["loss"] == 0.0 and r["grad_norm"] == 0.0 for r in read_metrics(tmp_path / "metrics.jsonl")
    )
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_loss_that_is_not_finite_names_the_rows(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path, zero_stage: int
) -> None:
    """NaN in a cached state stops the run before the optimiser steps and says where to look; no
    checkpoint is left."""
    good, bad = (
        toy.packed([toy.random_row(1, 20)], ["good"]),
        toy.packed([toy.random_row(2, 20)], ["bad"]),
    )
    bad.supervised.fill_(True)
    bad.hidden[7] = float("nan")
    head = toy.make_head(target)
    trainer = _trainer(
        trunk,
        head,
        _Listed([good, bad]),
        tmp_path,
        accumulation=2,
        checkpoint_every=1,
        zero_stage=zero_stage,
    )
    with pytest.raises(
        ValueError, match=r"the loss of optimiser step 0 is not finite: rows bad of rank 0"
    ):
        trainer.run()
    assert not any((tmp_path / "checkpoints").glob("step-*"))
    assert all(bool(value.isfinite().all()) for value in head.state_dict().values())


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_names_the_rows(
    trunk: Trunk,
    target: Path,
    toy: ModuleType,
    tmp_path: Path,
    zero_stage: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A finite loss whose gradient is NaN: the run stops with the rows, no weight has moved, and
    the checkpoint before is the newest and whole."""
    monkeypatch.setattr(Objective, "__call__", toy.spoilt("gradient", {"bad"}))
    good, bad = (toy.packed([toy.random_row(1, 20)], [name]) for name in ("good", "bad"))
    trainer = _trainer(
        trunk,
        toy.make_head(target),
        _Listed([good, good, good, bad]),
        tmp_path,
        accumulation=2,
        max_steps=3,
        checkpoint_every=1,
        zero_stage=zero_stage,
    )
    with pytest.raises(
        ValueError, match=r"the gradient of optimiser step 1 .*: rows bad of rank 0;"
    ):
        trainer.run()
    (kept,) = (tmp_path / "checkpoints").glob("step-*")
    assert kept.name == "step-00000001" and damage(kept) is None
    weights = load_file(kept / "weights.safetensors")
    for name, value in trainer.whole_head().state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_a_validation_that_fails_loses_no_step(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """The weights are written before they are judged; the next run judges them first, and ends as
    an undisturbed one with each validation logged once."""
    options = {"max_steps": 4, "validate_every": 2}
    failing = iter([True, False, True, False])

    def validate(head: Head) -> dict[str, Any]:
        torch.rand(5)  # what it draws does not count
        random.random()
        if next(failing):
            raise RuntimeError("the engine broke")
        return {"score": float(head.get_parameter("blocks.0.norm.weight").detach().sum())}

    def run(out: Path, judge: Callable[[Head], dict[str, Any]]) -> Tensor:
        head = toy.make_head(target)
        _trainer(trunk, head, toy.NoisePlan(), out, validate=judge, **options).run()
        return torch.cat([torch.rand(3), *(p.detach().flatten() for p in head.parameters())])

    for done in (2, 4):
        with pytest.raises(RuntimeError, match="broke"):
            run(tmp_path / "failing", validate)
        newest = sorted((tmp_path / "failing" / "checkpoints").glob("step-*"))[-1]
        assert newest.name == f"step-{done:08d}"
        assert json.loads((newest / "complete.json").read_text())["score"] is None
    ended = run(tmp_path / "failing", validate)
    failing = iter([False, False])
    assert torch.equal(ended, run(tmp_path / "calm", validate))
    lines = [list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("failing", "calm")]
    told = [[(r["kind"], r["step"], r.get("score")) for r in records] for records in lines]
    assert told[0] == told[1] and len(told[0]) == 6


def test_patience_ends_the_run(trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path) -> None:
    """Scores 1, 3, 2, 3 with patience 2: the run ends at the fourth validation, an equal score
    being no better one. It stays ended, and goes on with more patience or more steps."""
    scores = iter([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 2.0, 2.0])

    def run(**config: Any) -> TrainResult:
        options = {"max_steps": 40, "validate_every": 2, "log_every": 5, "patience": 2} | config
        judge = lambda head: {"score": next(scores)}  # noqa: E731
        head = toy.make_head(target)
        return _trainer(trunk, head, toy.NoisePlan(), tmp_path, validate=judge, **options).run()

    ended = run()
    assert ended.stopped_early and ended.step == 8
    assert ended.best is not None and (ended.best.step, ended.best.score) == (8, 3.0)
    again = run()
    assert again.stopped_early and (again.step, again.tokens) == (8, 0)
    with pytest.warns(UserWarning, match=r"train\.patience=3"):
        assert run(patience=3).step == 10
    with pytest.warns(UserWarning, match=r"train\.max_steps=60"):
        assert run(max_steps=60, patience=3).step == 16


def test_the_trunk_stays_as_it_was_and_out_of_every_file(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Embedding, final norm and lm_head: bit-identical, no gradient, in no optimiser group, in no
    checkpoint (76)."""
    norm = trunk.final_norm.state_dict()["weight"]
    before = [t.clone() for t in (trunk.embedding, trunk.lm_head, norm)]
    head = toy.make_head(target)
    trainer = _trainer(trunk, head, toy.NoisePlan(), tmp_path)
    trainer.run()
    after = [trunk.embedding, trunk.lm_head, trunk.final_norm.state_dict()["weight"]]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert not any(p.requires_grad for p in (*after, *trunk.final_norm.parameters()))
    trained = [p for group in trainer.engine.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in head.parameters()}
    names = set(trainer.engine.module.state_dict())
    assert names == {f"head.{name}" for name in head.state_dict()}
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    written = sum(path.stat().st_size for path in folder.iterdir())
    numbers = sum(p.numel() for p in head.parameters())
    assert 12 * numbers < written < 12 * numbers + 4 * trunk.embedding.numel()


_DRAWN = {
    "feature_noise": 0.2,
    "survivors": 0.5,
    "step_weights": (1.0, 0.5, 0.5),
    "checkpoint_activations": True,
}


@pytest.mark.parametrize(("prefetch", "more"), [(0, {}), (2, {}), (7, {}), (2, _DRAWN)])
def test_the_learning_rate_at_resume_is_that_of_the_step(
    trunk: Trunk,
    target: Path,
    toy: ModuleType,
    tmp_path: Path,
    prefetch: int,
    more: dict[str, Any],
) -> None:
    """Stopped at 4 of 8 and taken up by a new trainer: every line's rate is lr_at of its step,
    weights are those of the undisturbed run, Adam's moments included (77, 78); whatever was read
    ahead and not trained is read again, and what is drawn for a batch is drawn again."""
    options = {"max_steps": 8, "warmup_steps": 3, "checkpoint_every": 2, "prefetch": prefetch}
    options |= more
    whole = toy.make_head(target)
    _trainer(trunk, whole, toy.NoisePlan(), tmp_path / "whole", **options).run()

    class _Stop(Exception):
        pass

    class _Stopping(toy.NoisePlan):
        def batch(self, index: int) -> PackedBatch:
            if index == 5:
                raise _Stop
            return super().batch(index)

    with pytest.raises(_Stop):
        _trainer(trunk, toy.make_head(target), _Stopping(), tmp_path / "stopped", **options).run()
    head = toy.make_head(target, seed=9)
    trainer = _trainer(trunk, head, toy.NoisePlan(), tmp_path / "stopped", **options)
    trainer.run()
    for name, value in whole.state_dict().items():
        assert torch.equal(head.state_dict()[name], value)
    records = list(read_metrics(tmp_path / "stopped" / "metrics.jsonl"))
    assert [r["step"] for r in records] == list(range(1, 9))
    assert [r["lr"] for r in records] == [lr_at(step, trainer.cfg) for step in range(8)]


def test_a_changed_setting_is_told_at_resume(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Going on with another learning rate is allowed and said."""
    _trainer(trunk, toy.make_head(target), toy.NoisePlan(), tmp_path).run()
    trainer = _trainer(
        trunk, toy.make_head(target), toy.NoisePlan(), tmp_path, max_steps=3, lr=1e-4
    )
    with pytest.warns(UserWarning) as caught:
        trainer.run()
    told = [str(w.message) for w in caught if "resuming" in str(w.message)]
    assert [re.findall(r"train\.(\w+)=", text)[0] for text in told] == ["max_steps", "lr"]
    assert trainer.step == 3


def test_a_finished_run_is_not_trained_again(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """The second run loads the end and changes nothing."""
    first = toy.make_head(target)
    _trainer(trunk, first, toy.NoisePlan(), tmp_path).run()
    lines = (tmp_path / "metrics.jsonl").read_text()
    second = toy.make_head(target, seed=5)
    result = _trainer(trunk, second, toy.NoisePlan(), tmp_path).run()
    assert result.step == 2 and result.tokens == 0
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    assert all(
        torch.equal(second.state_dict()[name], value) for name, value in first.state_dict().items()
    )


def test_metrics_lines_hold_what_is_promised(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Per-step lists have K entries even while the unroll warms up; validation lines stand beside
    train lines."""
    head = toy.make_head(target)
    held_out = [toy.packed([toy.random_row(99, 40)])]
    trainer = _trainer(
        trunk, head, toy.NoisePlan(), tmp_path, max_steps=3, unroll_warmup=2, validate_every=2
    )
    trainer.validate = Validator(trainer.objective, held_out)
    result = trainer.run()
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(r["kind"], r["step"]) for r in records] == [
        ("train", 1),
        ("train", 2),
        ("validation", 2),
        ("train", 3),
        ("validation", 3),
    ]
    for record in (r for r in records if r["kind"] == "train"):
        assert set(record["seconds"]) == {"wait", "weigh", "forward", "backward", "step"}
        assert record["tokens_per_second"] > 0 and record["supervised"] > 0
        for name in ("agreement", "kl", "expected_acceptance"):
            assert len(record[name]) == 3
    assert [r["kl"][2] > 0 for r in records if r["kind"] == "train"] == [False, False, True]
    assert result.validation == {k: v for k, v in records[-1].items() if k not in ("kind", "step")}


def test_the_best_checkpoint_is_kept_and_handed_out(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Scores 1, 3, 2, 0 at steps 1 to 4: on_best sees 1 and 3; checkpoints left are the best and
    the newest."""
    scores = iter([1.0, 3.0, 2.0, 0.0])
    best: list[tuple[int, float]] = []
    result = _trainer(
        trunk,
        toy.make_head(target),
        toy.NoisePlan(),
        tmp_path,
        max_steps=4,
        validate_every=1,
        keep_checkpoints=1,
        validate=lambda head: {"score": next(scores)},
        on_best=lambda head, step, figures: best.append((step, figures["score"])),
    ).run()
    assert best == [(1, 1.0), (2, 3.0)]
    assert result.best is not None and (result.best.step, result.best.score) == (2, 3.0)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]


def test_bf16_keeps_fp32_weights_and_learns(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Autocast: parameters stay fp32 and take steps smaller than bf16 could hold; the loss
    falls."""
    head = toy.make_head(target)
    batch = toy.packed([toy.random_row(1, 40)])
    _trainer(trunk, head, _Listed([batch]), tmp_path, max_steps=15, precision="bf16").run()
    assert all(p.dtype == torch.float32 for p in head.parameters())
    losses = [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    weight = head.get_parameter("blocks.0.eh_proj.weight").detach()
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("kind", ["lk-alpha", "smooth-l1+0.1*kl", "0.5*topk+ce"])
def test_any_loss_trains_and_is_logged_beside_the_usual_figures(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path, kind: str
) -> None:
    """What is trained falls, under `loss`; soft cross-entropy and the teacher's mass outside the
    draft vocabulary stand beside it."""
    head, ids = toy.make_head(target), torch.arange(0, 512, 3)
    batch = toy.packed([toy.random_row(1, 40)])
    cfg = TrainConfig(
        max_steps=12,
        warmup_steps=0,
        log_every=1,
        precision="fp32",
        loss=LossConfig(kind, measure_outside=True),
    )
    Trainer(head, trunk, _Listed([batch]), cfg, tmp_path, draft_ids=ids, progress=False).run()
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(r["cross_entropy"] != r["loss"] for r in records)
    outside = Trainer(
        head, trunk, _Listed([batch]), cfg, tmp_path / "again", draft_ids=ids, progress=False
    ).objective(head, batch, 3)[1]
    assert records[0]["mass_outside_draft_vocabulary"] == pytest.approx(
        (outside.outside / outside.rows).tolist(), rel=1e-5
    )


def test_a_head_with_its_own_lm_head_trains_in_shards_too(
    tiny_llama_folder: Callable[..., Path], toy: ModuleType, tmp_path: Path
) -> None:
    """`lm_head` is read outside the head's forward pass; stage 3, which keeps a matrix of this
    size in shards, gathers it there and ends with stage 0's weights."""
    target = tiny_llama_folder(num_hidden_layers=2, vocab_size=4096)
    trunk = Trunk.load(target, torch.float32)
    ended = []
    for stage in (0, 3):
        head = toy.make_head(target)
        head.lm_head = nn.Parameter(trunk.lm_head.clone())
        trainer = _trainer(trunk, head, toy.NoisePlan(), tmp_path / str(stage), zero_stage=stage)
        trainer.run()
        ended.append(_weights(trainer.whole_head()))
    assert not torch.equal(ended[0]["lm_head"], trunk.lm_head)
    for name, value in ended[0].items():
        torch.testing.assert_close(ended[1][name], value, rtol=0, atol=1e-4, msg=name)


def test_steps_are_computed_again_in_shards_too(
    tiny_llama_folder: Callable[..., Path], toy: ModuleType, tmp_path: Path
) -> None:
    """Stage 3 gathers a step's matrices once more when backward runs it again: the weights are
    those of kept activations."""
    target = tiny_llama_folder(
        num_hidden_layers=2, hidden_size=384, intermediate_size=512, num_attention_heads=6
    )
    trunk, batch = Trunk.load(target, torch.float32), toy.packed([toy.random_row(1, 40, 384)])
    ended = []
    for again in (False, True):
        head = toy.make_head(target)
        options = {"zero_stage": 3, "checkpoint_activations": again}
        trainer = _trainer(trunk, head, _Listed([batch]), tmp_path / str(again), **options)
        assert head.get_parameter("blocks.0.eh_proj.weight").numel() == 0  # sharded
        trainer.run()
        ended.append(_weights(trainer.whole_head()))
    for name, value in ended[0].items():
        assert torch.equal(ended[1][name], value), name


def test_validation_in_shards_judges_and_keeps_whole_weights(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Stage 3: the validator may run the head, and what it leaves is still whole, of stage 0's
    weights."""
    kept: dict[int, dict[str, Tensor]] = {}

    def validate(head: Head) -> dict[str, Any]:
        batch = toy.NoisePlan().batch(0)
        with torch.no_grad():
            unroll(head, trunk, batch, 2)
        return {"score": 1.0}

    for stage in (0, 3):
        trainer = _trainer(
            trunk, toy.make_head(target), toy.NoisePlan(), tmp_path / str(stage), zero_stage=stage
        )
        trainer.validate = validate
        trainer.on_best = lambda head, step, figures, stage=stage: kept.update(
            {stage: _weights(head)}
        )
        trainer.run()
    assert kept[0].keys() == kept[3].keys()
    for name, value in kept[0].items():
        torch.testing.assert_close(kept[3][name], value, rtol=0, atol=1e-4, msg=name)


def test_fewer_steps_than_done_are_refused(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """A run is never called finished at a step that it has passed."""
    _trainer(trunk, toy.make_head(target), toy.NoisePlan(), tmp_path, max_steps=3).run()
    with (
        pytest.warns(UserWarning, match="train.max_steps=2; until then it was 3"),
        pytest.raises(ValueError, match="max_steps=2: this run has done 3 steps"),
    ):
        _trainer(trunk, toy.make_head(target), toy.NoisePlan(), tmp_path, max_steps=2).run()


def test_metrics_are_json_of_finite_numbers(
    trunk: Trunk, target: Path, toy: ModuleType, tmp_path: Path
) -> None:
    """Every line parses under a strict reader."""
    _trainer(trunk, toy.make_head(target), toy.NoisePlan(), tmp_path).run()

    def refuse(token: str) -> None:
        raise AssertionError(token)

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
