"""What is minimised: weighted soft cross-entropy of every unroll step to the target's distribution.

Step k of row p predicts x_{p+2+k}; its teacher is softmax(lm_head(norm(h_{p+1+k}))). So teacher row
t judges the students of rows t-1, t-2, ..., and is worked out once for all of them: states are
rolled by 1 + k before they meet it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..kernels.distill_loss import DistillStats, distill_loss
from ..kernels.shift import supervision
from ..models.heads import Head
from ..models.trunk import Trunk
from .unroll import split_states, unroll


class Objective:
    """Loss of a head on a packed batch. Holds the frozen trunk and is no module, so no optimiser
    can find it.

    Args:
        trunk: the target's frozen parts. step_weights: [K] weight of each unroll step.
        boundaries: those of the batches' states, ascending, L last; empty = L alone.
        draft_ids: int64 [Vd] of a reduced draft vocabulary; the teacher is renormalised over it.
            None = all.
        dtype: of the loss's matrix products; the lm_head rows are kept in it.
        chunk: rows of logits alive at a time, see `kernels.distill_loss`.
    """

    def __init__(
        self,
        trunk: Trunk,
        step_weights: list[float],
        *,
        boundaries: tuple[int, ...] = (),
        draft_ids: Tensor | None = None,
        dtype: torch.dtype,
        chunk: int | None = None,
    ) -> None:
        self.trunk = trunk
        self.boundaries = boundaries or (0,)
        self.step_weights = torch.tensor(step_weights, dtype=torch.float32, device=trunk.device)
        self.draft_ids = None if draft_ids is None else draft_ids.to(trunk.device)
        self.head_weight = trunk.lm_head_weight(self.draft_ids).to(dtype)
        self.dtype = dtype
        self.chunk = chunk

    def weights(self, batch: PackedBatch, steps: int) -> Tensor:
        """Weight of every row of every step, [K, N] fp32; 0 where the row is not supervised."""
        mask = supervision(batch.supervised, batch.starts, steps).to(self.step_weights.device)
        return mask * self.step_weights[:steps, None]

    def states(self, batch: PackedBatch) -> dict[int, Tensor]:
        """Raw states of a batch by boundary, [N, H] each; the last one is L."""
        return split_states(batch.hidden, self.boundaries, self.trunk.hidden_size)

    def teacher(self, batch: PackedBatch) -> Tensor:
        """What the target's lm_head reads, [N, H]."""
        return self.trunk.norm(self.states(batch)[self.boundaries[-1]])

    def __call__(self, head: Head, batch: PackedBatch, steps: int) -> tuple[Tensor, DistillStats]:
        """Sum over supervised rows of weight * CE (a scalar, not normalised) and its statistics.

        steps: K <= len(step_weights). `student_top[k, t]` belongs to chain row t - 1 - k (see
        `chain_rows`).
        """
        drafted = unroll(head, self.trunk, batch, steps, states=self.states(batch))
        students = torch.stack([drafted[k].roll(1 + k, 0) for k in range(steps)])
        return self.judge(
            students.to(self.dtype), self.teacher(batch), self.weights(batch, steps), head.lm_head
        )

    def judge(
        self,
        students: Tensor,
        normed: Tensor,
        weights: Tensor,
        student_head: Tensor | None = None,
    ) -> tuple[Tensor, DistillStats]:
        """students [K, N, H] already at their teacher's row; normed [N, H]; weights [K, N] by chain
        row; student_head [Vd, H] the head's own lm_head, whose logits are taken as they are; None
        for the target's rows."""
        # A supervised row's teacher lies in its own document, so what a roll carries around the end
        # has weight 0.
        aligned = torch.stack([row.roll(1 + k) for k, row in enumerate(weights)])
        return distill_loss(
            students,
            normed,
            aligned,
            self.head_weight,
            student_head=student_head,
            chunk=self.chunk,
            logit_scale=self.trunk.logit_scale,
            softcap=self.trunk.softcap,
        )


def chain_rows(aligned: Tensor) -> Tensor:
    """[K, N] by teacher row -> [K, N] by chain row: out[k, p] = aligned[k, p + 1 + k] (the end
    wraps)."""
    return torch.stack([row.roll(-(1 + k)) for k, row in enumerate(aligned)])
