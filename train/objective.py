"""What is minimised: a weighted loss of every unroll step against the target's distribution.

Step k of row p predicts x_{p+2+k}; its teacher is softmax(lm_head(norm(h_{p+1+k}))). So teacher row
t judges the students of rows t-1, t-2, ..., and is worked out once for all of them: states are
rolled by 1 + k before they meet it. Which loss: `kernels.losses`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..kernels.distill_loss import DistillStats, distill_loss
from ..kernels.losses import LossConfig
from ..kernels.shift import shift_tokens
from ..models.heads import Head
from ..models.trunk import Trunk
from .unroll import split_states, unroll


class Objective:
    """Loss of a head on a packed batch. Holds the frozen trunk and is no module, so no optimiser
    can find it.

    A head's own `lm_head` [V or Vd, H] reads the head's states plainly, without the target's logit
    scale and soft cap. Heads without one are read through the target's.

    Args:
        trunk: the target's frozen parts. step_weights: [K] weight of each unroll step.
        boundaries: those of the batches' states, ascending, L last; empty = L alone.
        draft_ids: int64 [Vd] of a reduced draft vocabulary; the teacher is renormalised over it.
            None = all.
        dtype: of the loss's matrix products; the lm_head rows are kept in it.
        chunk: rows of logits alive at a time, see `kernels.distill_loss`. loss: what is minimised.
        unroll: how the steps are run, `unroll.unroll` or another function that gives the same.
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
        loss: LossConfig = LossConfig(),  # noqa: B008 (frozen)
        unroll: Callable[..., Tensor] = unroll,
    ) -> None:
        self.trunk = trunk
        self.unroll = unroll
        self.boundaries = boundaries or (0,)
        self.step_weights = torch.tensor(step_weights, dtype=torch.float32, device=trunk.device)
        self.draft_ids = None if draft_ids is None else draft_ids.to(trunk.device)
        self.head_weight = trunk.lm_head_weight(self.draft_ids).to(dtype)
        self.dtype = dtype
        self.chunk = chunk
        self.loss = loss
        self.full_head = None
        if loss.measure_outside and draft_ids is not None:
            self.full_head = trunk.lm_head.to(dtype)
        elif loss.measure_outside:
            warnings.warn(
                "train.loss.measure_outside has no effect: the head drafts over the whole "
                "vocabulary",
                stacklevel=2,
            )
        # [V] column of each token, -1 outside the draft vocabulary
        self._columns: Tensor | None = None
        if loss.labels == "data" and self.draft_ids is not None:
            self._columns = self.draft_ids.new_full((trunk.vocab_size,), -1)
            self._columns[self.draft_ids] = torch.arange(
                len(self.draft_ids), device=self.draft_ids.device
            )

    def weights(self, batch: PackedBatch, steps: int) -> Tensor:
        """Weight of every row of every step, [K, N] fp32; 0 where the row is not supervised."""
        mask = batch.chains(steps).to(self.step_weights.device)
        return mask * self.step_weights[:steps, None]

    def states(self, batch: PackedBatch) -> dict[int, Tensor]:
        """Raw states of a batch by boundary, [N, H] each; the last one is L."""
        return split_states(batch.hidden, self.boundaries, self.trunk.hidden_size)

    def teacher(self, batch: PackedBatch) -> Tensor:
        """What the target's lm_head reads, [N, H]."""
        return self.trunk.norm(self.states(batch)[self.boundaries[-1]])

    def __call__(self, head: Head, batch: PackedBatch, steps: int) -> tuple[Tensor, DistillStats]:
        """Sum over supervised rows of weight * loss (a scalar, not normalised) and its statistics.

        steps: K <= len(step_weights). `student_top[k, t]` belongs to chain row t - 1 - k (see
        `chain_rows`).
        """
        drafted = self.unroll(head, self.trunk, batch, steps, states=self.states(batch))
        students = torch.stack([drafted[k].roll(1 + k, 0) for k in range(steps)])
        return self.judge(
            students.to(self.dtype),
            self.teacher(batch),
            self.weights(batch, steps),
            labels=self.labels(batch),
            student_head=head.lm_head,
        )

    def labels(self, batch: PackedBatch) -> Tensor | None:
        """Column of the data's token for every teacher row, int64 [N]; -1 where its document ends
        or the draft vocabulary lacks the token. None where the loss takes the teacher's argmax."""
        if self.loss.labels == "teacher":
            return None
        tokens = shift_tokens(batch.tokens.long(), batch.starts, 1, fill=-1)
        if self._columns is None:
            return tokens
        return torch.where(tokens >= 0, self._columns[tokens.clamp(min=0)], -1)

    def judge(
        self,
        students: Tensor,
        normed: Tensor,
        weights: Tensor,
        *,
        labels: Tensor | None = None,
        student_head: Tensor | None = None,
    ) -> tuple[Tensor, DistillStats]:
        """students [K, N, H'] already at their teacher's row; normed [N, H]; weights [K, N] by
        chain row; labels [N] by teacher row; student_head [V, H'] where the students have their
        own."""
        # A supervised row's teacher lies in its own document, so what a roll carries around the end
        # has weight 0.
        aligned = torch.stack([row.roll(1 + k) for k, row in enumerate(weights)])
        return distill_loss(
            students,
            normed,
            aligned,
            self.head_weight,
            loss=self.loss,
            labels=labels,
            student_head=student_head,
            full_head=self.full_head,
            chunk=self.chunk,
            logit_scale=self.trunk.logit_scale,
            softcap=self.trunk.softcap,
        )


def chain_rows(aligned: Tensor) -> Tensor:
    """[K, N] by teacher row -> [K, N] by chain row: out[k, p] = aligned[k, p + 1 + k] (the end
    wraps)."""
    return torch.stack([row.roll(-(1 + k)) for k, row in enumerate(aligned)])
