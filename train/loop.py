"""The training loop: one DeepSpeed engine around one head, from one CPU process to many GPUs.

One optimiser step reads world_size * accumulation batches of the plan, counts their supervised
weight over all ranks *first*, and divides every loss by it; so neither packing, nor accumulation,
nor the number of ranks changes what a token counts, and a batch without supervised rows adds
exactly zero. The frozen trunk never becomes part of the engine's module.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..data.batches import PackedBatch
from ..models.heads import Head
from ..models.trunk import Trunk
from .checkpoint import Checkpoint, Checkpoints
from .config import TrainConfig
from .engine import make_engine
from .metrics import MetricsFile
from .objective import Objective
from .ranks import import_deepspeed, rank, start, sum_over_ranks, world_size
from .reader import Reader
from .row_chunks import unroll_in_chunks
from .schedule import lr_at
from .sequence import SequenceGroup
from .tracker import Tracker
from .unroll import unroll
from .window import Window

_WAIT_SHARE = 0.1  # of a metrics window: more is told
_WAIT_SECONDS = 1.0  # waited for less, a window is too short to judge by


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
        self.tracker, self.validate, self.on_best = tracker, validate, on_best
        self.progress = progress
        start(self.device)
        _seed(cfg.seed + rank())
        self.sequence = SequenceGroup(cfg.sequence_parallel, cfg.steps)
        dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
        self.objective = Objective(
            trunk,
            cfg.step_weights(),
            boundaries=boundaries,
            draft_ids=draft_ids,
            dtype=dtype,
            loss=cfg.loss,
            unroll=_unroll_of(cfg, self.sequence),
        )
        self.head = head.to(self.device).train()
        self.engine = make_engine(self.head, self.objective, cfg)
        out.mkdir(parents=True, exist_ok=True)
        self.metrics = MetricsFile(out / "metrics.jsonl")
        self.checkpoints = Checkpoints(out / "checkpoints", cfg.keep_checkpoints)
        self.step = 0
        self.cursor = 0
        self.tokens = 0
        self.last_validation: dict[str, Any] | None = None
        self._window = Window(cfg.steps, self.device)
        self._told_of_waiting = False

    def run(self) -> TrainResult:
        """Resume what lies in `out`, train to cfg.max_steps, validate and checkpoint the end.

        Raises:
            ValueError: a batch gave a loss that is not finite (its rows are named; no weight was
            changed by it).
        """
        self.resume()
        if self.step > self.cfg.max_steps:
            raise ValueError(
                f"train.max_steps={self.cfg.max_steps}: this run has done {self.step} steps "
                "already; give a larger number, or another work folder"
            )
        bar = tqdm(
            total=self.cfg.max_steps,
            initial=self.step,
            unit="step",
            disable=not self.progress or rank() != 0,
            dynamic_ncols=True,
        )
        with Reader(self._read, self._own_batches(), self.cfg.prefetch) as reader, bar:
            self._window.restart()
            while self.step < self.cfg.max_steps:
                self._one_step(reader)
                bar.update()
                last = self.step == self.cfg.max_steps
                if last or self.step % self.cfg.log_every == 0:
                    record = self._log()
                    bar.set_postfix(
                        loss=f"{record['loss']:.3f}",
                        tok_s=f"{record['tokens_per_second']:.0f}",
                        wait=f"{record['wait_share']:.1%}",
                        refresh=False,
                    )
                self._validate_and_checkpoint(last)
        return TrainResult(self.step, self.tokens, self.checkpoints.best(), self.last_validation)

    def resume(self) -> Checkpoint | None:
        """Load the newest whole checkpoint in `out`, if any, and cut metrics.jsonl back to it."""
        found = self.checkpoints.latest()
        if found is not None:
            _warn_of_changes(found, self.cfg)
            self.checkpoints.load(self.engine, found, self.cfg.zero_stage)
            self.step, self.cursor = found.step, self.plan.load_state_dict(found.data)
        if rank() == 0:
            self.metrics.truncate_after(self.step)
        return found

    def _own_batches(self) -> range:
        """Global indices of the batches that this rank trains from here to the end."""
        group = self.sequence
        left = (self.cfg.max_steps - self.step) * self.cfg.accumulation * group.count
        return range(self.cursor + group.number, self.cursor + left, group.count)

    def _read(self, index: int) -> PackedBatch:
        return self.sequence.share(self.plan.batch(index)).to(self.device)

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
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
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
                self._check_losses(losses, batches)
                norm = self._stage_zero_norm()
            with window.phase("step"):
                self.engine.step()
        window.norm = float(self.engine.get_global_grad_norm() if norm is None else norm)
        if not math.isfinite(window.norm):
            self._refuse("gradient norm", batches)
        window.tokens += int(num_tokens)
        window.unsupervised += int(unsupervised)
        self.tokens += int(num_tokens)
        self.cursor += cfg.accumulation * self.sequence.count
        self.step += 1

    def _check_losses(self, losses: list[Tensor], batches: list[PackedBatch]) -> None:
        """Refuse before the optimiser steps; every rank learns of it, so none waits for one that
        stopped."""
        bad = ~torch.stack(losses).isfinite()
        if bool(sum_over_ranks(bad.sum().double()) > 0):
            self._refuse(
                "loss", [b for b, is_bad in zip(batches, bad.tolist(), strict=True) if is_bad]
            )

    def _refuse(self, what: str, batches: list[PackedBatch]) -> NoReturn:
        rows = ", ".join(str(row) for batch in batches for row in batch.row_ids)
        where = f"rows {rows} of rank {rank()}" if rows else "a batch of another rank"
        raise ValueError(
            f"the {what} of optimiser step {self.step} is not finite: {where}; check those "
            f"rows' cached states for NaN (`doctor`) or lower train.lr={self.cfg.lr}; no "
            "checkpoint holds this step"
        )

    def _stage_zero_norm(self) -> Tensor | None:
        """Global gradient norm before clipping where DeepSpeed keeps none (stage 0); its gradients
        are averaged already."""
        if self.cfg.zero_stage > 0:
            return None
        return torch.nn.utils.get_total_norm(
            [p.grad for p in self.head.parameters() if p.grad is not None]
        )

    def _log(self) -> dict[str, Any]:
        record = {
            "kind": "train",
            "step": self.step,
            "lr": lr_at(self.step - 1, self.cfg),
            **self._window.summary(),
        }
        self._window.restart()
        if rank() == 0:
            self._write(record)
            self._tell_of_waiting(record)
        return record

    def _tell_of_waiting(self, record: dict[str, Any]) -> None:
        """Warn once where data comes too slowly; a moment's waiting says nothing."""
        share = record["wait_share"]
        seconds = sum(record["seconds"].values())
        if self._told_of_waiting or share <= _WAIT_SHARE or share * seconds < _WAIT_SECONDS:
            return
        self._told_of_waiting = True
        warnings.warn(
            f"{share:.0%} of the time before step {self.step} was waiting for data: raise "
            f"train.prefetch={self.cfg.prefetch} where reading is uneven; where it is too slow "
            "throughout, put the cache on a local disk, or with data.source=online give the "
            "target more ranks (data.online.target_ranks) or dump a cache",
            stacklevel=3,
        )

    def _write(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)
        if self.tracker is not None:
            kind = record["kind"]
            self.tracker.log(
                record["step"],
                {kind: {k: v for k, v in record.items() if k not in ("kind", "step")}},
            )

    def _validate_and_checkpoint(self, last: bool) -> None:
        cfg, score = self.cfg, None
        validates = self.validate is not None and (last or _due(self.step, cfg.validate_every))
        if validates and self.validate is not None:
            best, head = self.checkpoints.best(), self.whole_head()
            figures = self.last_validation = self.validate(head)
            score = float(figures["score"])
            if rank() == 0:
                self._write({"kind": "validation", "step": self.step, **figures})
                if self.on_best is not None and (
                    best is None or best.score is None or score >= best.score
                ):
                    self.on_best(head, self.step, figures)
        if validates or last or _due(self.step, cfg.checkpoint_every):
            data = self.plan.state_dict(self.cursor)
            self.checkpoints.save(
                self.engine,
                self.step,
                data=data,
                score=score,
                zero_stage=cfg.zero_stage,
                config=asdict(cfg),
            )
            self._window.forget_time()

    def whole_head(self) -> Head:
        """The head with all its weights on every rank: itself, or at stage 3, where each rank keeps
        shards and a forward pass puts them back there, a copy as of now. All ranks must call it."""
        head = self.head
        if self.cfg.zero_stage < 3:
            return head
        with import_deepspeed(self.device).zero.GatheredParameters(list(head.parameters())):
            tensors = {name: value.detach().clone() for name, value in head.state_dict().items()}
        whole = type(head)(head.config, head.target_config, head.draft_vocab_size)
        if head.lm_head is not None:
            whole.lm_head = nn.Parameter(tensors["lm_head"])
        whole.load_state_dict(tensors)
        return whole.to(self.device).train()


def _unroll_of(cfg: TrainConfig, sequence: SequenceGroup) -> Callable[..., Tensor]:
    if sequence.size > 1:
        return sequence.unroll
    return unroll if cfg.chunk_tokens is None else partial(unroll_in_chunks, rows=cfg.chunk_tokens)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _warn_of_changes(found: Checkpoint, cfg: TrainConfig) -> None:

    now = asdict(cfg)
    now["betas"] = list(cfg.betas)
    changed = [name for name in now if found.config.get(name) != now[name]]
    for name in changed:
        warnings.warn(
            f"resuming {found.folder.name} with train.{name}={now[name]!r}; until then it was "
            f"{found.config.get(name)!r}",
            stacklevel=3,
        )
