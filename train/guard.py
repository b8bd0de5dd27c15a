"""The guard of an optimiser step: a loss or gradient that is not finite ends the run, with the rows
it came from, before a weight is changed."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..models.heads import Head
from .objective import Objective
from .ranks import gather_over_ranks, sum_over_ranks


def require_finite_losses(losses: list[Tensor], batches: list[PackedBatch], step: int) -> None:
    """Refuse a loss of any rank. Args: losses: scalars, one a batch. All ranks must call it."""
    bad = ~torch.stack(losses).isfinite()
    if bool(sum_over_ranks(bad.sum().double()) > 0):
        _refuse("loss", batches, bad.tolist(), step)


def refuse_gradient(
    objective: Objective,
    head: Head,
    batches: list[PackedBatch],
    *,
    steps: int,
    scale: float,
    step: int,
) -> NoReturn:
    """Refuse a step's gradient: each batch is run once more by itself to find whose it is.

    Args:
        head: whole weights, which the step has not changed. steps: unroll steps. scale: what the
            losses were multiplied with. All ranks must call it.
    """
    parameters = [p for p in head.parameters() if p.requires_grad]
    bf16 = objective.dtype == torch.bfloat16
    bad = []
    for batch in batches:
        with torch.autocast(objective.trunk.device.type, torch.bfloat16, enabled=bf16):
            loss, _ = objective(head, batch, steps)
        found = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
        bad.append(not all(bool(g.isfinite().all()) for g in found if g is not None))
    _refuse("gradient", batches, bad, step)


def _refuse(what: str, batches: list[PackedBatch], bad: list[bool], step: int) -> NoReturn:
    """End the run on every rank with the rows of all, so that none waits for one that stopped."""
    faulty = [batch for batch, is_bad in zip(batches, bad, strict=True) if is_bad]
    rows = gather_over_ranks([str(row) for batch in faulty for row in batch.row_ids])
    told = [f"rows {', '.join(names)} of rank {r}" for r, names in enumerate(rows) if names]
    where = "; ".join(told) or "of no batch alone, but of their sum"
    raise ValueError(
        f"the {what} of optimiser step {step} is not finite: {where}; check those rows' cached "
        "states for NaN (`doctor`) or lower train.lr; no weight was changed by this step, and no "
        "checkpoint holds it"
    )
