"""What a training run is told; see `loop.Trainer` for what it does with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..kernels.losses import LossConfig

PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Counts are optimiser steps unless a name says otherwise."""

    steps: int = 3
    """Unroll steps K: drafts per row, each fed the head's own state of the step before."""
    step_decay: float = 0.8
    """Weight of unroll step k (0-based) in the loss: step_decay ** k."""
    unroll_warmup: int = 0
    """Optimiser steps at the start that train unroll step 0 alone."""
    loss: LossConfig = field(default_factory=LossConfig)
    """What is minimised."""
    draft_vocab_size: int | None = None
    """Size of a reduced draft vocabulary; None drafts over the whole vocabulary."""
    max_steps: int = 1000
    """Optimiser steps of the whole run, counted from its beginning and not from a resume."""
    tokens_per_batch: int = 2048
    """Most tokens of one packed micro-batch on one rank; a longer row is a batch of its own."""
    chunk_tokens: int | None = None
    """Rows of a batch whose activations are alive at a time; each chunk is run again in the
    backward pass. None keeps all."""
    sequence_parallel: int = 1
    """Ranks that train each batch together, every one a share of its rows; 1: each rank trains
    batches of its own."""
    prefetch: int = 2
    """Micro-batches that a thread reads ahead on each rank; 0 reads each when it is needed."""
    accumulation: int = 1
    """Micro-batches per rank and optimiser step."""
    lr: float = 2e-3
    """Peak learning rate."""
    warmup_steps: int = 20
    """Linear warm-up."""
    min_lr_ratio: float = 0.05
    """Where the cosine ends, as a share of `lr`."""
    weight_decay: float = 0.0
    """AdamW's, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    zero_stage: int = 0
    """DeepSpeed ZeRO stage, 0 to 3."""
    precision: str = "bf16"
    """bf16: autocast over fp32 weights; fp32: no autocast."""
    log_every: int = 10
    """Steps between metrics lines."""
    validate_every: int = 200
    """Steps between validations; 0 validates at the end only. The validated weights are always
    checkpointed."""
    checkpoint_every: int = 200
    """Steps between checkpoints; 0 checkpoints where it validates only."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep; the best is kept besides."""
    seed: int = 0
    """Seeds torch, numpy and random; the order of batches has its own seed in the batch plan."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "max_steps",
            "tokens_per_batch",
            "sequence_parallel",
            "accumulation",
            "log_every",
            "keep_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)}: must be at least 1")
        for name in (
            "prefetch",
            "unroll_warmup",
            "warmup_steps",
            "validate_every",
            "checkpoint_every",
            "grad_clip",
            "weight_decay",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"train.{name}={getattr(self, name)}: must be a number that is not negative"
                )
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"train.step_decay={self.step_decay}: must lie in (0, 1]")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"train.lr={self.lr}: must be a positive number")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas={self.betas}: must be two numbers in [0, 1)")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"train.min_lr_ratio={self.min_lr_ratio}: must lie in [0, 1]")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(
                f"train.draft_vocab_size={self.draft_vocab_size}: must be at least 1, or null"
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"train.chunk_tokens={self.chunk_tokens}: must be at least 1, or null")
        if self.chunk_tokens is not None and self.sequence_parallel > 1:
            raise ValueError(
                f"train.chunk_tokens={self.chunk_tokens} with train.sequence_parallel="
                f"{self.sequence_parallel}: chunks run in the order of the rows, which ranks of a "
                "group do at once; set one of them to null or 1"
            )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"train.zero_stage={self.zero_stage}: must be 0, 1, 2 or 3")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"train.precision={self.precision!r}: must be one of {', '.join(PRECISIONS)}"
            )

    def step_weights(self) -> list[float]:
        """Weight of each unroll step, [K]."""
        return [self.step_decay**k for k in range(self.steps)]

    def unroll_steps(self, step: int) -> int:
        """Unroll steps that optimiser step `step` (0-based) trains."""
        return 1 if step < self.unroll_warmup else self.steps
