"""What a training run is told; see `loop.Trainer` for what it does with it."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Literal

from ..kernels.losses import LossConfig

CHOICES = {
    "unroll_growth": ("jump", "linear"),
    "context": ("engine", "causal"),
    "precision": ("bf16", "fp32"),
    "optimizer": ("adamw", "muon"),
    "lr_schedule": ("cosine", "linear", "constant"),
    "offload": ("none", "optimizer", "all"),
}


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Counts are optimiser steps unless a name says otherwise."""

    steps: int = 3
    """Unroll steps K: drafts per row, each fed the head's own state of the step before."""
    step_decay: float = 0.8
    """Weight of unroll step k (0-based) in the loss: step_decay ** k."""
    step_weights: tuple[float, ...] | None = None
    """The K weights themselves, in place of step_decay; 0 leaves a step out of the loss."""
    unroll_warmup: int = 0
    """Optimiser steps at the start that train fewer unroll steps than K."""
    unroll_growth: Literal["jump", "linear"] = "jump"
    """During unroll_warmup: jump trains unroll step 0 alone; linear trains 1, 2, ..., K - 1 of
    them, each for an equal share of it."""
    context: Literal["engine", "causal"] = "engine"
    """What a row of unroll step k attends to while training. engine: the committed rows of its
    prefix and its own chain, as when drafting; causal: rows of step k alone, for comparison.
    Validation always has engine."""
    checkpoint_activations: bool = False
    """Compute each unroll step again in backward instead of keeping its activations: less memory,
    more time, the same gradients."""
    feature_noise: float = 0.0
    """Width a of noise that is uniform in [-a/2, a/2], added to each number of the state that
    unroll step 0 is fed while training (EAGLE-1: 0.2)."""
    survivors: float = 0.0
    """Share of chains that are trained only as far as they would be used: up to the first of their
    own drafts that is not the text's token. The others are trained at all K steps."""
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
    optimizer: str = "adamw"
    """adamw | muon: Muon on matrices, AdamW on vectors, embeddings and lm_head."""
    lr: float = 2e-3
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.02
    """Peak learning rate of what Muon trains: the spectral norm of one step."""
    lr_schedule: str = "cosine"
    """cosine | linear | constant: how the rate goes from its peak to its end, after the warm-up."""
    warmup_steps: int = 20
    """Linear warm-up."""
    min_lr_ratio: float = 0.05
    """Where the schedule ends, as a share of the peak; `constant` stays at the peak."""
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    zero_stage: int = 0
    """DeepSpeed ZeRO stage, 0 to 3."""
    offload: str = "none"
    """none | optimizer | all: keep the optimiser (ZeRO 1 to 3), or weights as well (ZeRO 3), in
    host memory."""
    precision: str = "bf16"
    """bf16: autocast over fp32 weights; fp32: no autocast."""
    log_every: int = 10
    """Steps between metrics lines; a validation has one before it, too."""
    validate_every: int = 200
    """Steps between validations; 0 validates at the end only. The validated weights are always
    checkpointed."""
    checkpoint_every: int = 200
    """Steps between checkpoints; 0 checkpoints where it validates only."""
    patience: int = 0
    """Validations in a row without a better score that end the run; 0 never ends it early."""
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
            "patience",
            "grad_clip",
            "weight_decay",
            "feature_noise",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"train.{name}={getattr(self, name)}: must be a number that is not negative"
                )
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"train.step_decay={self.step_decay}: must lie in (0, 1]")
        if not 0 <= self.survivors <= 1:
            raise ValueError(f"train.survivors={self.survivors}: must lie in [0, 1]")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"train.{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}"
                )
        for name in ("lr", "muon_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"train.{name}={getattr(self, name)}: must be a positive number")
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
        self._check_step_weights()
        self._refuse_combinations()
        self._warn_of_ignored()

    def _check_step_weights(self) -> None:
        weights = self.step_weights
        if weights is None:
            return
        place = f"train.step_weights={list(weights)}"
        if self.step_decay != TrainConfig.step_decay:
            raise ValueError(
                f"{place} and train.step_decay={self.step_decay} both weigh the steps; give one"
            )
        if len(weights) != self.steps:
            raise ValueError(
                f"{place}: give one weight for each of train.steps={self.steps} unroll steps"
            )
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise ValueError(f"{place}: must be numbers that are not negative, and not all 0")
        if self.unroll_warmup and not weights[0]:
            raise ValueError(
                f"{place}: train.unroll_warmup={self.unroll_warmup} begins with unroll step 0, "
                "whose weight is 0; give it a weight, or no warm-up"
            )

    def _refuse_combinations(self) -> None:
        if self.patience and not self.validate_every:
            raise ValueError(
                f"train.patience={self.patience} counts validations, and train.validate_every=0 "
                "has none before the end; give validate_every, or patience=0"
            )
        other = {
            f"train.chunk_tokens={self.chunk_tokens}": self.chunk_tokens is not None,
            f"train.sequence_parallel={self.sequence_parallel}": self.sequence_parallel > 1,
        }
        for name in (name for name, used in other.items() if used):
            if self.context != "engine" or self.checkpoint_activations:
                raise ValueError(
                    f"{name} with train.context={self.context} and train.checkpoint_activations="
                    f"{self.checkpoint_activations}: it runs the steps in a way of its own, in the "
                    "engine's context; use context=engine and checkpoint_activations=false"
                )
        if self.sequence_parallel > 1 and (self.feature_noise or self.survivors):
            raise ValueError(
                f"train.sequence_parallel={self.sequence_parallel} with train.feature_noise="
                f"{self.feature_noise} and train.survivors={self.survivors}: these draw by the "
                "rows of whole batches; set them to 0"
            )
        if self.chunk_tokens is not None and self.zero_stage == 3:
            raise ValueError(
                f"train.chunk_tokens={self.chunk_tokens} with train.zero_stage=3: all ranks gather "
                "a weight whenever the head runs, and ranks whose batches have more chunks run it "
                "more often, so they would wait for each other for ever; use zero_stage=2"
            )
        needed = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if self.zero_stage < needed:
            raise ValueError(
                f"train.offload={self.offload} needs train.zero_stage={needed} or more, and it is "
                f"{self.zero_stage}: DeepSpeed moves only what a stage has sharded"
            )
        if self.optimizer == "muon" and self.offload != "none":
            raise ValueError(
                f"train.optimizer=muon with train.offload={self.offload}: its momentum stays on "
                "the device; use offload=none, or adamw"
            )
        if self.optimizer == "muon" and self.zero_stage > 0 and self.grad_clip > 0:
            raise ValueError(
                f"train.optimizer=muon with train.zero_stage={self.zero_stage} and "
                f"train.grad_clip={self.grad_clip}: DeepSpeed would clip Muon's finished step "
                "instead of the gradient; set grad_clip=0, or zero_stage=0"
            )

    def _warn_of_ignored(self) -> None:
        if self.unroll_growth != "jump" and (self.unroll_warmup == 0 or self.steps == 1):
            warnings.warn(
                f"train.unroll_growth={self.unroll_growth} has no effect with "
                f"train.unroll_warmup={self.unroll_warmup} and train.steps={self.steps}",
                stacklevel=4,
            )
        if self.survivors and self.steps == 1:
            warnings.warn(
                f"train.survivors={self.survivors} has no effect: with train.steps=1 no step "
                "follows a draft",
                stacklevel=4,
            )

    def weights(self) -> list[float]:
        """Weight of each unroll step, [K]."""
        if self.step_weights is not None:
            return list(self.step_weights)
        return [self.step_decay**k for k in range(self.steps)]

    def unroll_steps(self, step: int) -> int:
        """Unroll steps that optimiser step `step` (0-based) trains."""
        if step >= self.unroll_warmup:
            return self.steps
        if self.unroll_growth == "jump":
            return 1
        return 1 + step * (self.steps - 1) // self.unroll_warmup
