"""A training configuration refuses what cannot be meant."""

from __future__ import annotations

import re
from typing import Any

import pytest

from draftsmith.train.config import TrainConfig

MUON = {"optimizer": "muon"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("max_steps", 0),
        ("accumulation", 0),
        ("tokens_per_batch", 0),
        ("log_every", 0),
        ("keep_checkpoints", 0),
        ("warmup_steps", -1),
        ("validate_every", -1),
        ("grad_clip", -0.5),
        ("step_decay", 0.0),
        ("step_decay", 1.5),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("grad_clip", float("nan")),
        ("grad_clip", float("inf")),
        ("weight_decay", float("nan")),
        ("betas", (2.0, 0.95)),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9, float("nan"))),
        ("betas", (0.9,)),
        ("min_lr_ratio", 1.1),
        ("feature_noise", -0.1),
        ("feature_noise", float("inf")),
        ("survivors", 1.5),
        ("survivors", float("nan")),
        ("unroll_growth", "quadratic"),
        ("context", "Engine"),
        ("draft_vocab_size", 0),
        ("zero_stage", 4),
        ("precision", "fp16"),
        ("optimizer", "sgd"),
        ("muon_lr", 0.0),
        ("lr_schedule", "wsd"),
        ("offload", "nvme"),
        ("patience", -1),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    """The refusal names the option as it is written on the command line, and the value."""
    with pytest.raises(ValueError, match=re.escape(f"train.{field}={value!r}")):
        TrainConfig(**{field: value})


@pytest.mark.parametrize(
    ("told", "settings"),
    [
        ("patience=2 counts", {"patience": 2, "validate_every": 0}),
        ("offload=optimizer needs train.zero_stage=1", {"offload": "optimizer"}),
        ("offload=all needs train.zero_stage=3", {"offload": "all", "zero_stage": 2}),
        ("offload=optimizer: its momentum", {"offload": "optimizer", "zero_stage": 1} | MUON),
        ("grad_clip=1.0: DeepSpeed would clip", {"zero_stage": 1} | MUON),
    ],
)
def test_settings_that_do_not_go_together(told: str, settings: dict[str, Any]) -> None:
    """Both settings stand in the refusal, and what to do."""
    with pytest.raises(ValueError, match=re.escape(told)):
        TrainConfig(**settings)


def test_step_weights_fall_geometrically() -> None:
    """Step k weighs step_decay ** k."""
    assert TrainConfig(steps=3, step_decay=0.5).weights() == [1.0, 0.5, 0.25]


def test_unroll_warm_up_trains_one_step_first() -> None:
    """The first unroll_warmup optimiser steps unroll once, the others K times."""
    cfg = TrainConfig(steps=4, unroll_warmup=2)
    assert [cfg.unroll_steps(step) for step in range(4)] == [1, 1, 4, 4]


def test_unroll_warm_up_may_grow_step_by_step() -> None:
    """1, 2, ..., K - 1 unroll steps for equal shares of the warm-up, then K."""
    cfg = TrainConfig(steps=4, unroll_warmup=6, unroll_growth="linear")
    assert [cfg.unroll_steps(step) for step in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]
    two = TrainConfig(steps=2, unroll_warmup=3, unroll_growth="linear")
    assert [two.unroll_steps(step) for step in range(5)] == [1, 1, 1, 2, 2]
    with pytest.warns(UserWarning, match=r"unroll_growth=linear has no effect.*unroll_warmup=0"):
        TrainConfig(unroll_growth="linear")


def test_step_weights_may_be_given_one_by_one() -> None:
    """In place of the decay; a list that cannot be meant is refused with its value."""
    assert TrainConfig(steps=3, step_weights=(1.0, 0.0, 2.0)).weights() == [1.0, 0.0, 2.0]
    for settings, words in (
        ({"step_decay": 0.5}, r"step_weights=\[1.0, 0.5, 0.2\] and train.step_decay=0.5"),
        ({"steps": 2}, r"one weight for each of train.steps=2"),
        ({"step_weights": (1.0, -1.0, 0.0)}, "not negative"),
        ({"step_weights": (1.0, float("nan"), 0.0)}, "not negative"),
        ({"step_weights": (0.0, 0.0, 0.0)}, "not all 0"),
        ({"step_weights": (0.0, 1.0, 1.0), "unroll_warmup": 5}, "unroll_warmup=5 begins"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainConfig(**{"step_weights": (1.0, 0.5, 0.2), **settings})


def test_survivors_of_one_step_warn() -> None:
    """A chain of one draft ends by itself."""
    with pytest.warns(UserWarning, match="survivors=1.0 has no effect"):
        TrainConfig(steps=1, survivors=1.0)
