"""The learning rate depends on the optimiser step and the configuration alone."""

from __future__ import annotations

import pytest

from draftsmith.train.config import TrainConfig
from draftsmith.train.schedule import lr_at

CFG = TrainConfig(max_steps=100, warmup_steps=10, lr=1e-3, min_lr_ratio=0.1)


def test_warm_up_rises_linearly_to_the_peak() -> None:
    """Step 0 already moves; the last warm-up step is at the peak, and so is the first of the
    cosine."""
    assert [lr_at(step, CFG) for step in (0, 4, 9)] == pytest.approx([1e-4, 5e-4, 1e-3])
    assert lr_at(10, CFG) == pytest.approx(1e-3)


def test_cosine_falls_to_the_floor_and_stays() -> None:
    """Half way is the middle of peak and floor; past the end nothing moves."""
    assert lr_at(55, CFG) == pytest.approx((1e-3 + 1e-4) / 2)
    assert lr_at(100, CFG) == lr_at(5000, CFG) == pytest.approx(1e-4)
    falling = [lr_at(step, CFG) for step in range(10, 101)]
    assert all(a > b for a, b in zip(falling, falling[1:], strict=False))


def test_linear_and_constant() -> None:
    """The same warm-up; half way to the floor half way; or no fall at all."""
    linear, constant = (
        TrainConfig(max_steps=100, warmup_steps=10, lr=1e-3, min_lr_ratio=0.1, lr_schedule=kind)
        for kind in ("linear", "constant")
    )
    for cfg in (linear, constant):
        assert [lr_at(step, cfg) for step in range(11)] == [lr_at(step, CFG) for step in range(11)]
    assert lr_at(55, linear) == pytest.approx((1e-3 + 1e-4) / 2)
    assert lr_at(28, linear) == pytest.approx(1e-3 - 0.2 * 9e-4)
    assert lr_at(100, linear) == pytest.approx(1e-4)
    assert lr_at(99, constant) == lr_at(5000, constant) == 1e-3


def test_neither_warm_up_nor_decay_may_be_empty_of_meaning() -> None:
    """No warm-up starts at the peak; a run of warm-up alone does not divide by zero."""
    assert lr_at(0, TrainConfig(warmup_steps=0, lr=0.5)) == 0.5
    assert lr_at(7, TrainConfig(warmup_steps=7, max_steps=7, lr=0.5)) == 0.5
    with pytest.raises(ValueError, match="step -1"):
        lr_at(-1, CFG)


def test_accumulation_and_batch_size_do_not_enter() -> None:
    """Only optimiser steps count (85)."""
    other = TrainConfig(
        max_steps=100,
        warmup_steps=10,
        lr=1e-3,
        min_lr_ratio=0.1,
        accumulation=4,
        tokens_per_batch=64,
    )
    assert [lr_at(step, other) for step in range(120)] == [lr_at(step, CFG) for step in range(120)]
