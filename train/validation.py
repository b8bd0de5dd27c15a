"""Validation: what the head predicts on held-out text, and what the engine accepts from it.

Teacher-forced figures are measured with the true tokens fed at every step:

    agreement[k]     share of rows supervised at step k where the head's argmax is the target's
    conditional[k]   the same among chains whose steps 0..k-1 all agreed
    joint            share of chains whose K steps all agreed = product of the conditionals

The last two run over one population, the chains supervised at all K steps. The target's argmax is
over its whole vocabulary even where the head drafts over a part, so a token outside the draft
vocabulary counts as a miss. `loss` is the soft cross-entropy whatever is trained, so that runs of
different losses compare; what is trained stands beside it as `objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..models.heads import Head
from .objective import Objective, chain_rows
from .ranks import barrier, rank, sum_over_ranks
from .sequence import SequenceGroup

Acceptance = Callable[[Head], dict[str, Any]]
_CHUNK = 128  # rows of full-vocabulary logits alive at a time


class Validator:
    """Callable for `loop.Trainer`: head -> figures, the same on every rank.

    Args:
        objective: the run's loss, whose trunk, step weights and draft vocabulary are used.
        batches: held-out batches; each rank takes every world_size-th, or its share of every
            one of its group's.
        acceptance: runs the live head in the engine and returns its figures, called on rank 0
            alone. Its key "score" (a float, higher is better) chooses the best checkpoint; without
            `acceptance` it is -loss.
        sequence: the run's, whose unroll the objective has; None where each rank is alone.
    """

    def __init__(
        self,
        objective: Objective,
        batches: Sequence[PackedBatch],
        acceptance: Acceptance | None = None,
        sequence: SequenceGroup | None = None,
    ) -> None:
        if not batches:
            raise ValueError(
                "validation has no held-out batch; keep rows out of training, or do not validate"
            )
        self.objective = objective
        self.batches = batches
        self.acceptance = acceptance
        self.sequence = sequence or SequenceGroup(1, len(objective.step_weights))

    @torch.no_grad()
    def __call__(self, head: Head) -> dict[str, Any]:
        """Figures of one validation; all ranks must call it. Raises ValueError where no held-out
        row is supervised."""
        steps = len(self.objective.step_weights)
        device = self.objective.trunk.device
        sums = torch.zeros(8, steps, dtype=torch.float64, device=device)
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        training = head.training
        head.eval()
        group = self.sequence
        for batch in self.batches[group.number :: group.count]:
            part, total = self._measure(head, group.share(batch), steps)
            sums += part
            totals += total
        head.train(training)
        sum_over_ranks(sums)
        sum_over_ranks(totals)
        figures = _figures(sums.cpu(), totals.cpu())
        if self.acceptance is not None and rank() == 0:
            figures["acceptance"] = self.acceptance(head)
            figures["score"] = float(figures["acceptance"]["score"])
        barrier()
        return figures

    def _measure(self, head: Head, batch: PackedBatch, steps: int) -> tuple[Tensor, Tensor]:
        """Sums of one batch: [8, K] and [2]; see `_figures` for their order."""
        objective = self.objective
        autocast = torch.autocast(
            objective.trunk.device.type, objective.dtype, enabled=objective.dtype == torch.bfloat16
        )
        with autocast:
            _, stats = objective(head, batch, steps)
        needed = (stats.teacher_top >= 0).nonzero().squeeze(1)
        top, outside = teacher_summary(objective, batch, needed)
        drafted = stats.student_top
        if objective.draft_ids is not None:
            drafted = torch.where(drafted >= 0, objective.draft_ids[drafted.clamp(min=0)], -1)
        full_top = torch.full_like(stats.teacher_top, -2)
        full_top[needed] = top
        agreed = chain_rows(drafted == full_top)
        mask = batch.chains(steps).to(agreed.device)
        survived = (agreed & mask[-1]).cumprod(
            0
        )  # [K, N] by chain row, chains supervised at all K steps
        rows = torch.stack(
            [
                stats.cross,
                stats.loss,
                stats.weight,
                stats.rows,
                stats.kl,
                stats.acceptance,
                (agreed & mask).sum(1),
                survived.sum(1),
            ]
        ).double()
        return rows, torch.stack([mask[-1].sum().double(), outside.sum()])


def teacher_summary(
    objective: Objective, batch: PackedBatch, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's argmax over the whole vocabulary, int64 [n], and its probability mass outside
    the draft vocabulary, float64 [n], for the teacher rows `rows` [n] of a batch."""
    trunk, ids, normed = objective.trunk, objective.draft_ids, objective.teacher(batch)
    tops, outside = [rows.new_zeros(0)], [torch.zeros(0, dtype=torch.float64, device=rows.device)]
    for part in rows.split(_CHUNK):
        logits = trunk.logits(normed[part]).float()
        tops.append(logits.argmax(-1))
        inside = 1.0 if ids is None else logits.softmax(-1)[:, ids].double().sum(-1)
        outside.append(
            (1.0 - inside) * torch.ones(part.numel(), dtype=torch.float64, device=rows.device)
        )
    return torch.cat(tops), torch.cat(outside)


def _figures(sums: Tensor, totals: Tensor) -> dict[str, Any]:
    loss, trained, weight, rows, kl, acceptance, agreed, survived = sums
    chains, outside = totals.tolist()
    if not weight.sum() > 0:
        raise ValueError(
            "no held-out row is supervised, so validation has nothing to measure: check the loss "
            "mask of the rows"
        )
    before = torch.cat([totals[:1], survived[:-1]])
    conditional = survived / before.clamp(min=1)
    figures: dict[str, Any] = {
        "loss": float(loss.sum() / weight.sum()),
        "objective": float(trained.sum() / weight.sum()),
        "rows": int(rows[0]),
        "chains": int(chains),
        "agreement": (agreed / rows.clamp(min=1)).tolist(),
        "conditional_agreement": conditional.tolist(),
        "joint_agreement": float(survived[-1] / max(chains, 1)),
        "kl": (kl / rows.clamp(min=1)).tolist(),
        "expected_acceptance": (acceptance / rows.clamp(min=1)).tolist(),
        "mass_outside_draft_vocabulary": outside / max(float(rows[0]), 1.0),
    }
    figures["score"] = -figures["loss"]
    return figures
