"""The training loop: one DeepSpeed engine around one head, from one CPU process to many GPUs.

One optimiser step reads world_size * accumulation batches of the plan, counts their supervised
weight over all ranks *first*, and divides every loss by it; so neither packing, nor accumulation,
nor the number of ranks changes what a token counts, and a batch without supervised rows adds
exactly zero. The frozen trunk never becomes part of the engine's module.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..models.heads import Head
from ..models.trunk import Trunk
from .checkpoint import Checkpoint, Checkpoints, random_state_kept
from .config import TrainConfig
from .engine import gradient_norm, make_engine, set_rate
from .guard import refuse_gradient, require_finite_losses
from .log import RunLog
from .objective import Objective
from .ranks import gather_over_ranks, rank, start, sum_over_ranks, world_size
from .reader import Reader
from .row_chunks import unroll_in_chunks
from .schedule import lr_at
from .sequence import SequenceGroup
from .state import whole_head
from .tracker import Tracker
from .window import Window


class BatchSource(Protocol):
    """Batches by one global index that runs on over epochs; `data.batches.BatchPlan` is one."""

    def batch(self, index: int) -> PackedBatch:
        """The batch at `index` >= 0, the same whenever and wherever it is asked for."""
        ...

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """The cursor with what gives it its meaning; JSON-ready."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """The cursor of a state; ValueError where it was counted over other data."""
        ...


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    """Optimiser steps done."""
    tokens: int
    """Tokens read by this process group since it started or resumed."""
    best: Checkpoint | None
    """The checkpoint of the highest validation score."""
    validation: dict[str, Any] | None
    """Figures of the last validation."""
    stopped_early: bool = False
    """Whether cfg.patience ended the run."""


class Trainer:
    """Trains a head in place; see the module's text.

    Args:
        head: fp32 parameters; moved to the trunk's device.
        trunk: the target's frozen parts, left bit-identical.
        plan: the batches. Step s of group g of G (`sequence.SequenceGroup`; ranks, where each has
            batches of its own) reads indices cursor + m * G + g for m < accumulation.
        cfg: see `TrainConfig`. out: holds metrics.jsonl and checkpoints/; an unfinished run in it
            is resumed.
        boundaries: those of the batches' states, ascending; empty = L alone.
        draft_ids: int64 [Vd] of a reduced draft vocabulary, or None.
        tracker: gets every metrics line as well. validate: head -> figures with a "score" (higher
            is better); called on all ranks with whole weights. on_best: called on rank 0 with
            (head, step, figures) at every new best score.
    """

    def __init__(
        self,
        head: Head,
        trunk: Trunk,
        plan: BatchSource,
        cfg: TrainConfig,
        out: Path,
        *,
        boundaries: tuple[int, ...] = (),
        draft_ids: Tensor | None = None,
        tracker: Tracker | None = None,
        validate: Callable[[Head], dict[str, Any]] | None = None,
        on_best: Callable[[Head, int, dict[str, Any]], None] | None = None,
        progress: bool = True,
    ) -> None:
        self.cfg, self.plan, self.device = cfg, plan, trunk.device
        self.validate, self.on_best = validate, on_best
        start(self.device)
        _seed(cfg.seed + rank())
        self.sequence = SequenceGroup(cfg.sequence_parallel, cfg.steps)
        dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
        self.objective = Objective(
            trunk,
            cfg.weights(),
            boundaries=boundaries,
            draft_ids=draft_ids,
            dtype=dtype,
            loss=cfg.loss,
            context=cfg.context,
            recompute=cfg.checkpoint_activations,
            feature_noise=cfg.feature_noise,
            survivors=cfg.survivors,
            seed=cfg.seed,
            unroll=_unroll_of(cfg, self.sequence),
        )
        self.objective.check(head)
        self.head = head.to(self.device).train()
        self.engine = make_engine(self.head, self.objective, cfg)
        out.mkdir(parents=True, exist_ok=True)
        path = out / "metrics.jsonl"
        self.log = RunLog(path, tracker, prefetch=cfg.prefetch, progress=progress)
        self.checkpoints = Checkpoints(out / "checkpoints", cfg.keep_checkpoints)
        self.step = 0
        self.cursor = 0
        self.tokens = 0
        self.unimproved = 0
        self.last_validation: dict[str, Any] | None = None
        self._window = Window(cfg.steps, self.device)

    def run(self) -> TrainResult:
        """Resume what lies in `out`, train to cfg.max_steps or until cfg.patience ends it; the end
        is checkpointed and validated.

        Raises:
            ValueError: a batch gave a loss or a gradient that is not finite (its rows are named; no
            weight was changed by it).
        """
        found = self.resume()
        if self.step > self.cfg.max_steps:
            raise ValueError(
                f"train.max_steps={self.cfg.max_steps}: this run has done {self.step} steps "
                "already; give a larger number, or another work folder"
            )
        if found is not None and found.score is None and self._validates():
            self._validate(found)  # it was killed, or failed, in the validation of this step
        bar = self.log.bar(self.step, self.cfg.max_steps)
        with Reader(self._read, self._own_batches(), self.cfg.prefetch) as reader, bar:
            self._window.restart()
            while self.step < self.cfg.max_steps and not self._out_of_patience():
                self._one_step(reader)
                bar.update()
                if self._last() or self._validates() or self.step % self.cfg.log_every == 0:
                    figures = self._window.summary()
                    self._window.restart()
                    self.log.trained(self.step, lr_at(self.step - 1, self.cfg), figures)
                self._checkpoint_and_validate()
        return TrainResult(
            self.step,
            self.tokens,
            self.checkpoints.best(),
            self.last_validation,
            self._out_of_patience() and self.step < self.cfg.max_steps,
        )

    def resume(self) -> Checkpoint | None:
        """Load the newest whole checkpoint in `out`, if any, and cut metrics.jsonl back to it."""
        found = self.checkpoints.latest()
        if found is not None:
            _warn_of_changes(found, self.cfg)
            self.checkpoints.load(self.engine, found)
            self.step, self.cursor = found.step, self.plan.load_state_dict(found.data)
            # More steps than it was stopped for are a new chance.
            same_end = found.config["max_steps"] == self.cfg.max_steps
            self.unimproved = found.unimproved if same_end else 0
        validated = found is not None and found.score is not None
        self.log.continue_after(self.step, validated=validated)
        return found

    def _last(self) -> bool:
        return self.step == self.cfg.max_steps

    def _validates(self) -> bool:
        """Whether the weights after this step are validated."""
        due = self._last() or _due(self.step, self.cfg.validate_every)
        return self.validate is not None and due

    def _out_of_patience(self) -> bool:
        return 0 < self.cfg.patience <= self.unimproved

    def _own_batches(self) -> range:
        """Global indices of the batches that this rank trains from here to the end."""
        group = self.sequence
        left = (self.cfg.max_steps - self.step) * self.cfg.accumulation * group.count
        return range(self.cursor + group.number, self.cursor + left, group.count)

    def _read(self, index: int) -> PackedBatch:
        batch = replace(self.plan.batch(index), index=index)
        return self.sequence.share(batch).to(self.device)

    def _one_step(self, reader: Reader) -> None:
        cfg, window = self.cfg, self._window
        steps, rate = cfg.unroll_steps(self.step), lr_at(self.step, cfg)
        with window.phase("wait"):
            batches = [reader.next() for _ in range(cfg.accumulation)]
        with window.phase("weigh"):
            own = torch.stack([self.objective.weights(batch, steps).sum() for batch in batches])
            read = own.new_tensor(float(sum(batch.num_tokens for batch in batches)))
            totals = torch.stack([own.sum(), read, (own == 0).sum()]).double()
            weight, num_tokens, unsupervised = sum_over_ranks(totals).tolist()
        set_rate(self.engine, rate, cfg)
        # DeepSpeed averages over ranks and accumulation; undo both, then divide by what was
        # supervised anywhere. Shares of one batch add up as batches do.
        scale = world_size() * cfg.accumulation / weight if weight > 0 else 0.0
        losses = []
        norm = None
        for number, batch in enumerate(batches):
            with window.phase("forward"):
                loss, stats = self.engine(batch, steps)
                window.add(stats)
                losses.append(stats.loss.sum())
            with window.phase("backward"):
                self.engine.backward(loss * scale)
            if number + 1 == len(batches):
                require_finite_losses(losses, batches, self.step)
                norm = gradient_norm(self.engine)
                if norm is not None:
                    self._require_finite(norm, batches, steps, scale)
            with window.phase("step"):
                self.engine.step()
        # From stage 1 on DeepSpeed skips the optimiser's step by itself, and gives infinity.
        window.norm = float(self.engine.get_global_grad_norm()) if norm is None else norm
        self._require_finite(window.norm, batches, steps, scale)
        window.tokens += int(num_tokens)
        window.unsupervised += int(unsupervised)
        self.tokens += int(num_tokens)
        self.cursor += cfg.accumulation * self.sequence.count
        self.step += 1

    def _require_finite(
        self, norm: float, batches: list[PackedBatch], steps: int, scale: float
    ) -> None:
        if not math.isfinite(norm):
            head, step = self.whole_head(), self.step
            refuse_gradient(self.objective, head, batches, steps=steps, scale=scale, step=step)

    def _checkpoint_and_validate(self) -> None:
        """Weights first, then their judgement: a validation that fails or is killed loses none."""
        validates = self._validates()
        if not (validates or self._last() or _due(self.step, self.cfg.checkpoint_every)):
            return
        saved = self.checkpoints.save(
            self.engine,
            self.step,
            data=self.plan.state_dict(self.cursor),
            unimproved=self.unimproved,
            config=asdict(self.cfg),
        )
        if validates:
            self._validate(saved)
        self._window.forget_time()

    def _validate(self, saved: Checkpoint) -> None:
        """Judge the weights of a checkpoint, which is given the score once all of it is written."""
        assert self.validate is not None
        best = self.checkpoints.best()
        with random_state_kept():
            head = self.whole_head()
            figures = self.last_validation = self.validate(head)
        score, basis = float(figures["score"]), figures.get("basis")
        if best is not None and best.basis != basis:
            self._tell_of_another_basis(best, figures)
            best = None
        known = None if best is None else best.score
        unimproved = 0 if known is None or score > known else self.unimproved + 1
        self.log.validated(self.step, figures)
        if rank() == 0 and self.on_best is not None and (known is None or score >= known):
            self.on_best(head, self.step, figures)
        self.checkpoints.judge(saved, score, unimproved, basis)
        # One rank decides: another's disk may have shown it an older best, and a rank that ends
        # alone leaves the others waiting.
        self.unimproved = gather_over_ranks(unimproved)[0]

    def _tell_of_another_basis(self, best: Checkpoint, figures: dict[str, Any]) -> None:
        """Warn where the best so far was measured otherwise. The next best is of the new basis, so
        this is told once."""
        if rank() == 0:
            warnings.warn(
                f"the score {best.score:.4f} of step {best.step} was measured with other settings "
                "than validation has now (validate.*, engine.*, the held-out rows or the number "
                f"of processes), so step {self.step} begins a new best; it is measured with "
                f"{figures.get('measured_with')}",
                stacklevel=4,
            )

    def whole_head(self) -> Head:
        """The head with all its weights, see `state.whole_head`. All ranks must call it."""
        return whole_head(self.head, self.cfg.zero_stage, self.device)


def _unroll_of(cfg: TrainConfig, sequence: SequenceGroup) -> Callable[..., Tensor] | None:
    if sequence.size > 1:
        return sequence.unroll
    return None if cfg.chunk_tokens is None else partial(unroll_in_chunks, rows=cfg.chunk_tokens)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _warn_of_changes(found: Checkpoint, cfg: TrainConfig) -> None:
    now = json.loads(json.dumps(asdict(cfg)))  # as the marker has it: a tuple is a list
    changed = [name for name in now if found.config.get(name) != now[name]]
    for name in changed:
        warnings.warn(
            f"resuming {found.folder.name} with train.{name}={now[name]!r}; until then it was "
            f"{found.config.get(name)!r}",
            stacklevel=3,
        )
