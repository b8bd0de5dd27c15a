"""The learning rate, a pure function of the number of optimiser steps done."""

from __future__ import annotations

import math

from .config import TrainConfig


def lr_at(step: int, cfg: TrainConfig) -> float:
    """Learning rate of optimiser step `step` (0-based): linear warm-up, then cfg.lr_schedule from
    the peak to lr * min_lr_ratio.

    Neither ranks, nor accumulation, nor epochs, nor a resume enter. Steps past max_steps stay at
    the end value.
    Raises ValueError for a negative step.
    """
    if step < 0:
        raise ValueError(f"step {step}: optimiser steps count from 0")
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.lr_schedule == "constant":
        return cfg.lr
    span = max(1, cfg.max_steps - cfg.warmup_steps)
    progress = min(1.0, (step - cfg.warmup_steps) / span)
    linear = cfg.lr_schedule == "linear"
    left = 1.0 - progress if linear else 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * left)
