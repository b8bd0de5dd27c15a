"""Validation: what the head predicts on held-out text, and what the engine accepts from it.

Teacher-forced figures are measured with the true tokens fed at every step:

    agreement[k]     share of rows supervised at step k where the head's argmax is the target's
    conditional[k]   the same among chains whose steps 0..k-1 all agreed
    joint            share of chains whose K steps all agreed = product of the conditionals
    expected tokens  of a target call, which a run without the engine can be judged by: greedy is
                     1 + sum_k share of chains whose steps 0..k all agreed; sampled is
                     1 + sum_k prod_{j<=k} expected_acceptance[j], as if steps were independent

Those of chains run over one population, the chains supervised at all K steps. The target's argmax
is over its whole vocabulary even where the head drafts over a part, so a token outside the draft
vocabulary counts as a miss. `loss` is the soft cross-entropy whatever is trained, so that runs of
different losses compare; what is trained stands beside it as `objective`.

`by_context` has the same by the tokens that lie before the predicted one (row p: p + 2), in the
engine's own buckets. `basis` is the hash of what the score was measured with (`measured_with`):
scores of another basis do not compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..inference.metrics import CONTEXT_EDGES
from ..models.files import content_hash
from ..models.heads import Head
from .objective import Objective, chain_rows
from .ranks import sum_over_ranks
from .sequence import SequenceGroup

Acceptance = Callable[[Head], dict[str, Any]]
_STATS = ("cross", "loss", "weight", "rows", "kl", "acceptance")
_BUCKETS = (0, *CONTEXT_EDGES)
_CHUNK = 128  # rows of full-vocabulary logits alive at a time


class Validator:
    """Callable for `loop.Trainer`: head -> figures, the same on every rank.

    Args:
        objective: the run's loss, whose trunk, step weights and draft vocabulary are used.
        batches: held-out batches; each rank takes every world_size-th, or its share of every
            one of its group's.
        acceptance: runs the live head in the engine; called on every rank, and returns the same
            figures on each. Its "score" (a float, higher is better) chooses the best checkpoint,
            and its "measured_with" (JSON-ready) is all that determines that score but the weights;
            without `acceptance` the score is -loss.
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
        self._edges = torch.tensor(CONTEXT_EDGES, device=objective.trunk.device)
        self._rows = content_hash(sorted(row for batch in batches for row in batch.row_ids))[:12]
        self.sequence = sequence or SequenceGroup(1, len(objective.step_weights))

    @torch.no_grad()
    def __call__(self, head: Head) -> dict[str, Any]:
        """Figures of one validation; all ranks must call it. Raises ValueError where no held-out
        row is supervised."""
        weights = self.objective.step_weights.tolist()
        steps = len(weights)
        device = self.objective.trunk.device
        shape = (len(_STATS) + 3, len(_BUCKETS), steps)
        sums = torch.zeros(shape, dtype=torch.float64, device=device)
        outside = torch.zeros(2, dtype=torch.float64, device=device)
        training = head.training
        head.eval()
        group = self.sequence
        for batch in self.batches[group.number :: group.count]:
            part, masses = self._measure(head, group.share(batch), steps)
            sums += part
            outside += masses
        head.train(training)
        sum_over_ranks(sums)
        sum_over_ranks(outside)
        figures = _figures(sums.cpu(), outside.cpu())
        figures["score"] = -figures["loss"]
        measured_with = {"score": "-loss", "rows": self._rows, "step_weights": weights}
        if self.acceptance is not None:
            acceptance = dict(self.acceptance(head))
            measured_with = acceptance.pop("measured_with")
            figures["acceptance"] = acceptance
            figures["score"] = float(acceptance["score"])
        figures["basis"] = content_hash(measured_with)[:12]
        figures["measured_with"] = measured_with
        return figures

    def _measure(self, head: Head, batch: PackedBatch, steps: int) -> tuple[Tensor, Tensor]:
        """Sums of one batch: [M, buckets, K], see `_figures` for their order, and [2], the
        teacher's mass outside the draft vocabulary and of how many rows it is the sum."""
        objective = self.objective
        device = objective.trunk.device
        mask = batch.chains(steps).to(device)
        bucket = torch.bucketize(batch.positions.to(device) + 2, self._edges, right=True)
        autocast = torch.autocast(
            device.type, objective.dtype, enabled=objective.dtype == torch.bfloat16
        )
        # Rows without weight cost the loss nothing, so a call for each bucket costs about one call.
        with autocast:
            students = objective.aligned(objective.drafted(head, batch, steps))
            normed, labels = objective.teacher(batch), objective.labels(batch)
            weights = objective.weights(batch, steps)
            judged = {
                index: objective.judge(
                    students,
                    normed,
                    weights * (bucket == index),
                    labels=labels,
                    student_head=head.lm_head,
                )[1]
                for index in bucket[mask[0]].unique().tolist() or [0]
            }
        needed = torch.stack([stats.teacher_top for stats in judged.values()]).amax(0) >= 0
        top, outside = teacher_summary(objective, batch, needed.nonzero().squeeze(1))
        drafted = torch.stack([stats.student_top for stats in judged.values()]).amax(0)
        if objective.draft_ids is not None:
            drafted = torch.where(drafted >= 0, objective.draft_ids[drafted.clamp(min=0)], -1)
        full_top = drafted.new_full((drafted.shape[1],), -2)
        full_top[needed] = top
        agreed = chain_rows(drafted == full_top)
        # [K, N] by chain row: chains supervised at all K steps that agreed up to here
        survived = (agreed & mask[-1]).cumprod(0)
        sums = torch.zeros(
            len(_STATS) + 3, len(_BUCKETS), steps, dtype=torch.float64, device=device
        )
        for index, stats in judged.items():
            sums[: len(_STATS), index] = torch.stack([getattr(stats, s).double() for s in _STATS])
        for place, counted in enumerate((agreed & mask, survived, mask[-1].expand_as(mask)), -3):
            sums[place].index_add_(0, bucket, counted.T.double())
        # Each teacher row by its step-0 chain: several chains need it, which ranks may share.
        once = mask[0].roll(1)[needed]
        return sums, torch.stack([(outside * once).sum(), once.sum().double()])


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


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """What a head's folder keeps of its validation; the whole of it is in metrics.jsonl."""
    kept = {name: value for name, value in figures.items() if name != "by_context"}
    if "acceptance" in kept:
        left_out = ("runs", "samples")
        kept["acceptance"] = {k: v for k, v in kept["acceptance"].items() if k not in left_out}
    return kept


def _figures(sums: Tensor, outside: Tensor) -> dict[str, Any]:
    """sums: [M, buckets, K], the statistics of `_STATS`, then rows that agreed, chains that agreed
    up to each step, and all chains (alike at each step). outside: [2], a sum and its rows."""
    cross, trained, weight, rows, kl, acceptance, agreed, survived, chains = sums.sum(1)
    if not weight.sum() > 0:
        raise ValueError(
            "no held-out row is supervised, so validation has nothing to measure: check the loss "
            "mask of the rows"
        )
    before = torch.cat([chains[:1], survived[:-1]])
    expected = acceptance / rows.clamp(min=1)
    held = survived / chains.clamp(min=1)
    return {
        "loss": float(cross.sum() / weight.sum()),
        "objective": float(trained.sum() / weight.sum()),
        "rows": int(rows[0]),
        "chains": int(chains[0]),
        "agreement": (agreed / rows.clamp(min=1)).tolist(),
        "conditional_agreement": (survived / before.clamp(min=1)).tolist(),
        "joint_agreement": float(held[-1]),
        "kl": (kl / rows.clamp(min=1)).tolist(),
        "expected_acceptance": expected.tolist(),
        "expected_tokens_per_call": {
            "greedy": float(1 + held.sum()) if chains[0] else None,
            "sampled": float(1 + expected.cumprod(0).sum()),
        },
        "mass_outside_draft_vocabulary": float(outside[0] / outside[1].clamp(min=1)),
        "by_context": {
            str(low): _bucket(sums[:, index])
            for index, low in enumerate(_BUCKETS)
            if sums[_STATS.index("rows"), index].any()
        },
    }


def _bucket(sums: Tensor) -> dict[str, Any]:
    """One bucket of `by_context`, from its [M, K]. Raw counts, and what follows from them; None
    where there was nothing to count."""
    cross, _, weight, rows, _, _, agreed, survived, chains = sums
    return {
        "loss": float(cross.sum() / weight.sum()),
        "rows_per_step": rows.long().tolist(),
        "agreed_per_step": agreed.long().tolist(),
        "agreement": [
            a / r if r else None for a, r in zip(agreed.tolist(), rows.tolist(), strict=True)
        ],
        "chains": int(chains[0]),
        "expected_tokens_per_call": (
            float(1 + (survived / chains[0]).sum()) if chains[0] else None
        ),
    }
